//! The C functions, for any [`Mover`].
//!
//! Each checks its pointers, calls the safe code, and turns a fault into a line of NCCL's log and a code. No panic gets out.

use crate::abi::{
    Code, ContextConfig, HANDLE_BYTES, Logger, NET_DEVICE_GIN_PROXY, NetProperties, POINTER_CUDA, POINTER_HOST, Rma,
    RmaProperties, SIGNAL_ADD, SIGNAL_INC, SUCCESS,
};
use crate::coll::{Address, At, Coll, ContextHandle, Instance, Listener, Request, Transfer};
use crate::fault::{Fault, Result};
use crate::handle::{give, look, take};
use crate::mover::Mover;
use crate::trace;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Name of plugin and device.
const NAME: &std::ffi::CStr = c"tide-loopback";

type Out = *mut *mut c_void;

/// The plugin over a mover.
pub const fn table<M: Mover>() -> Rma {
    Rma {
        name: NAME.as_ptr(),
        init: init::<M>,
        devices: devices::<M>,
        get_rma_properties: get_rma_properties::<M>,
        get_properties: get_properties::<M>,
        listen: listen::<M>,
        connect: connect::<M>,
        create_context: create_context::<M>,
        reg_mr_sym: reg_mr_sym::<M>,
        reg_mr_sym_dma_buf: reg_mr_sym_dma_buf::<M>,
        dereg_mr_sym: dereg_mr_sym::<M>,
        destroy_context: destroy_context::<M>,
        close_coll: close_coll::<M>,
        close_listen: close_listen::<M>,
        iput: iput::<M>,
        iput_signal: iput_signal::<M>,
        iget: iget::<M>,
        iflush: iflush::<M>,
        test: test::<M>,
        rma_progress: Some(rma_progress::<M>),
        query_last_error: query_last_error::<M>,
        finalize: finalize::<M>,
    }
}

/// Carries out a call; its text is made only if it is told.
fn call<M: Mover>(text: impl Fn() -> String, body: impl FnOnce() -> Result<String>) -> Code {
    let result = catch_unwind(AssertUnwindSafe(body));
    let result = result.unwrap_or_else(|_| Err(Fault::internal("the plugin panicked; see stderr")));
    match result {
        Ok(outcome) => {
            // An empty outcome is that of a call which is made all the time and has done nothing.
            if trace::on() && !outcome.is_empty() {
                trace::line(format_args!("{} -> {outcome}", text()));
            }
            SUCCESS
        }
        Err(fault) => {
            let text = text();
            trace::line(format_args!("{text} -> code {}: {fault}", fault.code));
            M::world().warn(&format!("{text}: {fault}"));
            fault.code
        }
    }
}

fn done() -> Result<String> {
    Ok("done".to_owned())
}

/// Writes a result.
///
/// # Safety
/// `out` is null or can be written.
unsafe fn put_out<T>(out: *mut T, value: impl FnOnce() -> Result<T>) -> Result<()> {
    if out.is_null() {
        return Err(Fault::argument("no place for the result"));
    }
    let value = value()?;
    // SAFETY: not null, so it can be written.
    unsafe { out.write(value) };
    Ok(())
}

/// A region's number as the pointer that NCCL holds: never null.
fn region_handle(number: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(number + 1)
}

fn region_number(handle: *mut c_void) -> Result<usize> {
    handle.addr().checked_sub(1).ok_or_else(|| Fault::argument("no region"))
}

fn at(region: *mut c_void, offset: u64) -> Result<At> {
    Ok(At { region: region_number(region)?, offset })
}

// SAFETY: of all functions below: NCCL gives handles that it got here and has not given back, and writable places for
// results. `look`, `take` and `put_out` ask for just that.

unsafe extern "C" fn init<M: Mover>(instance: Out, comm: u64, logger: Option<Logger>) -> Code {
    call::<M>(
        || format!("init(comm {comm:#x})"),
        || {
            M::world().set_logger(logger);
            // SAFETY: see above.
            unsafe { put_out(instance, || Ok(give(Instance::new::<M>(comm))))? };
            done()
        },
    )
}

unsafe extern "C" fn devices<M: Mover>(count: *mut c_int) -> Code {
    call::<M>(
        || "devices()".to_owned(),
        || {
            // SAFETY: see above.
            unsafe { put_out(count, || Ok(1))? };
            Ok("1".to_owned())
        },
    )
}

unsafe extern "C" fn get_rma_properties<M: Mover>(coll: *mut c_void, properties: *mut RmaProperties) -> Code {
    call::<M>(
        || format!("getRmaProperties({coll:p})"),
        || {
            // It would be true, but weak signals are to be tried as what they are promised to be.
            // SAFETY: see above.
            unsafe { put_out(properties, || Ok(RmaProperties { flushes_all_puts_on_any_signal: false }))? };
            done()
        },
    )
}

unsafe extern "C" fn get_properties<M: Mover>(device: c_int, properties: *mut NetProperties) -> Code {
    let mut virtual_devices = [0; 9];
    virtual_devices[0] = 1;
    let value = NetProperties {
        name: NAME.as_ptr(),
        pci_path: std::ptr::null(),
        guid: u64::from_le_bytes(*b"tideloop"),
        ptr_support: POINTER_HOST | POINTER_CUDA,
        reg_is_global: 0,
        force_flush: 0,
        speed: 100_000,
        port: 1,
        latency: 0.0,
        max_comms: 1 << 16,
        max_recvs: 8,
        net_device_type: NET_DEVICE_GIN_PROXY,
        net_device_version: 0,
        virtual_devices,
        max_p2p_bytes: 1 << 40,
        max_coll_bytes: 1 << 40,
        max_multi_request_size: 1,
        rail_id: -1,
        plane_id: -1,
    };
    call::<M>(
        || format!("getProperties({device})"),
        || {
            if device != 0 {
                return Err(Fault::argument(format!("device {device} of 1")));
            }
            // SAFETY: see above.
            unsafe { put_out(properties, || Ok(value))? };
            done()
        },
    )
}

unsafe extern "C" fn listen<M: Mover>(
    instance: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    listener: Out,
) -> Code {
    call::<M>(
        || format!("listen(instance {instance:p}, device {device})"),
        || {
            // SAFETY: see above.
            let instance = unsafe { look::<Instance>(instance)? };
            if device != 0 {
                return Err(Fault::argument(format!("device {device} of 1")));
            }
            let (made, address) = Listener::new::<M>(instance);
            // SAFETY: see above; the handle has `HANDLE_BYTES`.
            unsafe {
                put_out(handle.cast::<[u8; HANDLE_BYTES]>(), || Ok(address.to_bytes()))?;
                put_out(listener, || Ok(give(made)))?;
            }
            Ok(format!("{address:x?}"))
        },
    )
}

unsafe extern "C" fn connect<M: Mover>(
    instance: *mut c_void,
    handles: *const *mut c_void,
    ranks: c_int,
    rank: c_int,
    listener: *mut c_void,
    coll: Out,
) -> Code {
    call::<M>(
        || format!("connect(instance {instance:p}, rank {rank} of {ranks}, listener {listener:p})"),
        || {
            // The instance goes unused: for host RMA, NCCL 2.32.3 gives another plugin's here.
            // SAFETY: see above.
            let listener = unsafe { look::<Listener>(listener)? };
            let (Ok(count), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else {
                return Err(Fault::argument(format!("rank {rank} of {ranks}")));
            };
            if handles.is_null() {
                return Err(Fault::argument("no handles"));
            }
            let mut addresses = Vec::with_capacity(count);
            for peer in 0..count {
                // SAFETY: NCCL gives one pointer per rank.
                let handle = unsafe { handles.add(peer).read() };
                if handle.is_null() {
                    return Err(Fault::argument(format!("no handle of rank {peer}")));
                }
                // SAFETY: each points to a handle; it need not be aligned.
                let bytes = unsafe { handle.cast::<[u8; HANDLE_BYTES]>().read_unaligned() };
                addresses.push(Address::from_bytes(&bytes));
            }
            // SAFETY: see above.
            unsafe { put_out(coll, || Ok(give(Arc::new(Coll::<M>::connect(&addresses, rank, listener)?))))? };
            // SAFETY: just written.
            Ok(format!("coll {:p} of group {:x?}", unsafe { coll.read() }, addresses[0]))
        },
    )
}

unsafe extern "C" fn create_context<M: Mover>(coll: *mut c_void, config: *const ContextConfig, context: Out) -> Code {
    call::<M>(
        || format!("createContext(coll {coll:p})"),
        || {
            // SAFETY: see above.
            let coll = unsafe { look::<Arc<Coll<M>>>(coll)? };
            // SAFETY: null or a configuration.
            let config = *unsafe { config.as_ref() }.ok_or_else(|| Fault::argument("no configuration"))?;
            // SAFETY: see above.
            unsafe { put_out(context, || Ok(give(coll.create_context(config)?)))? };
            // SAFETY: just written.
            Ok(format!("context {:p}: {config:?}", unsafe { context.read() }))
        },
    )
}

unsafe extern "C" fn reg_mr_sym<M: Mover>(
    coll: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    kind: c_int,
    flags: u64,
    region: Out,
) -> Code {
    let text = || format!("regMrSym(coll {coll:p}, {data:p}, {bytes} bytes, kind {kind}, flags {flags:#x})");
    call::<M>(text, || {
        if trace::on() {
            trace::line(format_args!("{} ...", text()));
        }
        // SAFETY: see above.
        let coll = unsafe { look::<Arc<Coll<M>>>(coll)? };
        // SAFETY: see above.
        unsafe { put_out(region, || coll.register(data.addr(), bytes, kind).map(region_handle))? };
        // SAFETY: just written.
        Ok(format!("region {:p} of rank {}", unsafe { region.read() }, coll.rank))
    })
}

unsafe extern "C" fn reg_mr_sym_dma_buf<M: Mover>(
    coll: *mut c_void,
    data: *mut c_void,
    bytes: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    region: Out,
) -> Code {
    // Not offered in `ptr_support`, so not called; a DMA-BUF is of no use here beyond the address.
    // SAFETY: as there.
    unsafe { reg_mr_sym::<M>(coll, data, bytes, kind, flags, region) }
}

unsafe extern "C" fn dereg_mr_sym<M: Mover>(coll: *mut c_void, region: *mut c_void) -> Code {
    call::<M>(
        || format!("deregMrSym(coll {coll:p}, region {region:p})"),
        || {
            // SAFETY: see above.
            let coll = unsafe { look::<Arc<Coll<M>>>(coll)? };
            coll.deregister(region_number(region)?)?;
            done()
        },
    )
}

unsafe extern "C" fn destroy_context<M: Mover>(context: *mut c_void) -> Code {
    call::<M>(
        || format!("destroyContext({context:p})"),
        || {
            // SAFETY: see above.
            unsafe { take::<ContextHandle<M>>(context)? }.destroy()?;
            done()
        },
    )
}

unsafe extern "C" fn close_coll<M: Mover>(coll: *mut c_void) -> Code {
    call::<M>(
        || format!("closeColl({coll:p})"),
        || {
            // SAFETY: see above.
            unsafe { take::<Arc<Coll<M>>>(coll)? }.close()?;
            done()
        },
    )
}

unsafe extern "C" fn close_listen<M: Mover>(listener: *mut c_void) -> Code {
    call::<M>(
        || format!("closeListen({listener:p})"),
        || {
            // SAFETY: see above.
            drop(unsafe { take::<Listener>(listener)? });
            done()
        },
    )
}

unsafe extern "C" fn iput<M: Mover>(
    context: *mut c_void,
    index: c_int,
    from_offset: u64,
    from: *mut c_void,
    bytes: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    options: u32,
    request: Out,
) -> Code {
    call::<M>(
        || {
            format!(
                "iput({context:p}[{index}], {from:p}+{from_offset:#x} to {to:p}+{to_offset:#x} of rank {rank}, {bytes} \
                 bytes, options {options})"
            )
        },
        || {
            // SAFETY: see above.
            let context = unsafe { look::<ContextHandle<M>>(context)? };
            let transfer = Transfer { local: at(from, from_offset)?, remote: at(to, to_offset)?, bytes };
            // SAFETY: see above.
            unsafe { put_out(request, || context.put(index, rank, Some(transfer), None).map(request_handle))? };
            // SAFETY: just written.
            Ok(format!("request {:p} of rank {}", unsafe { request.read() }, context.coll.rank))
        },
    )
}

unsafe extern "C" fn iput_signal<M: Mover>(
    context: *mut c_void,
    index: c_int,
    from_offset: u64,
    from: *mut c_void,
    bytes: usize,
    to_offset: u64,
    to: *mut c_void,
    rank: u32,
    signal_offset: u64,
    signal: *mut c_void,
    value: u64,
    operation: u32,
    strong: bool,
    options: u32,
    request: Out,
) -> Code {
    call::<M>(
        || {
            format!(
                "iputSignal({context:p}[{index}], {from:p}+{from_offset:#x} to {to:p}+{to_offset:#x} of rank {rank}, \
                 {bytes} bytes, signal {signal:p}+{signal_offset:#x}, operation {operation} by {value}, \
                 strong {strong}, options {options})"
            )
        },
        || {
            // SAFETY: see above.
            let context = unsafe { look::<ContextHandle<M>>(context)? };
            // A signal alone comes with no regions and no bytes.
            let transfer = if bytes == 0 {
                None
            } else {
                Some(Transfer { local: at(from, from_offset)?, remote: at(to, to_offset)?, bytes })
            };
            let value = match operation {
                SIGNAL_INC => 1,
                SIGNAL_ADD => value,
                _ => return Err(Fault::argument(format!("signal operation {operation}"))),
            };
            let signal = Some((at(signal, signal_offset)?, value));
            // SAFETY: see above.
            unsafe { put_out(request, || context.put(index, rank, transfer, signal).map(request_handle))? };
            // SAFETY: just written.
            Ok(format!("request {:p} of rank {}", unsafe { request.read() }, context.coll.rank))
        },
    )
}

unsafe extern "C" fn iget<M: Mover>(
    context: *mut c_void,
    index: c_int,
    remote_offset: u64,
    remote: *mut c_void,
    bytes: usize,
    local_offset: u64,
    local: *mut c_void,
    rank: u32,
    options: u32,
    request: Out,
) -> Code {
    call::<M>(
        || {
            format!(
                "iget({context:p}[{index}], {remote:p}+{remote_offset:#x} of rank {rank} to \
                 {local:p}+{local_offset:#x}, {bytes} bytes, options {options})"
            )
        },
        || {
            // SAFETY: see above.
            let context = unsafe { look::<ContextHandle<M>>(context)? };
            let transfer = Transfer { local: at(local, local_offset)?, remote: at(remote, remote_offset)?, bytes };
            // SAFETY: see above.
            unsafe { put_out(request, || context.get(index, rank, transfer).map(request_handle))? };
            // SAFETY: just written.
            Ok(format!("request {:p} of rank {}", unsafe { request.read() }, context.coll.rank))
        },
    )
}

unsafe extern "C" fn iflush<M: Mover>(
    context: *mut c_void,
    index: c_int,
    region: *mut c_void,
    rank: u32,
    request: Out,
) -> Code {
    call::<M>(
        || format!("iflush({context:p}[{index}], region {region:p}, rank {rank})"),
        || {
            // SAFETY: see above.
            unsafe { look::<ContextHandle<M>>(context)? };
            // What is done is visible at once: there is no NIC between.
            // SAFETY: see above.
            unsafe { put_out(request, || Ok(std::ptr::null_mut()))? };
            Ok("nothing to wait for".to_owned())
        },
    )
}

fn request_handle(request: Request) -> *mut c_void {
    std::ptr::without_provenance_mut(request.to_number())
}

unsafe extern "C" fn test<M: Mover>(coll: *mut c_void, request: *mut c_void, is_done: *mut c_int) -> Code {
    call::<M>(
        || format!("test(coll {coll:p}, request {request:p})"),
        || {
            // SAFETY: see above.
            let coll = unsafe { look::<Arc<Coll<M>>>(coll)? };
            let mut outcome = false;
            // SAFETY: see above.
            unsafe {
                put_out(is_done, || {
                    outcome = coll.test(Request::from_number(request.addr())?)?;
                    Ok(c_int::from(outcome))
                })?;
            }
            Ok(if outcome { "done".to_owned() } else { String::new() })
        },
    )
}

unsafe extern "C" fn rma_progress<M: Mover>(context: *mut c_void) -> Code {
    call::<M>(
        || format!("rmaProgress({context:p})"),
        || {
            // SAFETY: see above.
            let context = unsafe { look::<ContextHandle<M>>(context)? };
            // A fault was told when it came up, and `queryLastError` has it: this is called all the time.
            if !context.failed() {
                context.progress()?;
            }
            Ok(String::new())
        },
    )
}

unsafe extern "C" fn query_last_error<M: Mover>(context: *mut c_void, has_error: *mut bool) -> Code {
    call::<M>(
        || format!("queryLastError({context:p})"),
        || {
            // SAFETY: see above.
            let failed = unsafe { look::<ContextHandle<M>>(context)? }.failed();
            // SAFETY: see above.
            unsafe { put_out(has_error, || Ok(failed))? };
            Ok(if failed { "failed".to_owned() } else { String::new() })
        },
    )
}

unsafe extern "C" fn finalize<M: Mover>(instance: *mut c_void) -> Code {
    call::<M>(
        || format!("finalize({instance:p})"),
        || {
            // SAFETY: see above.
            drop(unsafe { take::<Instance>(instance)? });
            done()
        },
    )
}
