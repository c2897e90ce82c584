//! The interface as declared here against the debug information of the real library, and the export of the built plugin.

use nccl_loopback_plugin::abi::{ContextConfig, NetProperties, Rma, RmaProperties};
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A field: name, offset, size, and for functions the C type of each parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Field {
    name: String,
    offset: usize,
    size: usize,
    parameters: Option<Vec<String>>,
}

fn field(name: &str, offset: usize, size: usize) -> Field {
    Field { name: name.to_owned(), offset, size, parameters: None }
}

fn function(name: &str, offset: usize, parameters: &str) -> Field {
    let parameters = parameters.split(", ").map(str::to_owned).collect();
    Field { parameters: Some(parameters), ..field(name, offset, 8) }
}

/// What gdb says of a struct's fields and size.
fn parse(text: &str) -> (Vec<Field>, usize) {
    let (mut fields, mut total) = (Vec::new(), 0);
    for line in text.lines() {
        if let Some((_, size)) = line.split_once("total size (bytes):") {
            total = size.trim().trim_end_matches("*/").trim().parse().unwrap();
            continue;
        }
        let Some((place, declaration)) = line.split_once("*/") else { continue };
        let Some((offset, size)) = place.trim_start_matches("/*").split_once('|') else { continue };
        let (Ok(offset), Ok(size)) = (offset.trim().parse(), size.trim().parse()) else { continue };
        let declaration = declaration.trim().trim_end_matches(';');
        let mut found = field("", offset, size);
        match declaration.split_once("(*") {
            Some((_, rest)) => {
                let (name, parameters) = rest.split_once(")(").unwrap();
                found = function(name, offset, parameters.trim_end_matches(')'));
            }
            None => found.name = declaration.rsplit([' ', '*']).next().unwrap().to_owned(),
        }
        fields.push(found);
    }
    (fields, total)
}

/// The struct of that name as gdb prints it, or why it cannot be had.
fn from_library(name: &str) -> Result<String, String> {
    let folder = std::env::var_os("TIDE_NCCL_DIR").ok_or("TIDE_NCCL_DIR is not set")?;
    let library = Path::new(&folder).join("lib/libnccl.so.2");
    let command = format!("ptype /o struct {name}");
    let run = Command::new("gdb").args(["-batch", "-nx", "-ex", &command]).arg(&library).output();
    let run = run.map_err(|error| format!("gdb does not start: {error}"))?;
    let text = String::from_utf8_lossy(&run.stdout).into_owned();
    if text.contains("total size") {
        Ok(text)
    } else {
        Err(format!("gdb has no {name} in {}: {}", library.display(), String::from_utf8_lossy(&run.stderr).trim()))
    }
}

/// Compares, or says why it does not.
fn compare(name: &str, expected: (Vec<Field>, usize)) {
    match from_library(name) {
        Ok(text) => assert_eq!(parse(&text), expected, "{name}"),
        Err(reason) => println!("skipped: {reason}"),
    }
}

macro_rules! functions {
    ($($field:ident: $name:literal ($parameters:literal);)+) => {
        vec![$(function($name, offset_of!(Rma, $field), $parameters)),+]
    };
}

fn rma() -> (Vec<Field>, usize) {
    let mut fields = vec![field("name", offset_of!(Rma, name), 8)];
    fields.extend(functions! {
        init: "init"("void **, uint64_t, ncclDebugLogger_t");
        devices: "devices"("int *");
        get_rma_properties: "getRmaProperties"("void *, ncclRmaProperties_v16_t *");
        get_properties: "getProperties"("int, ncclNetProperties_v12_t *");
        listen: "listen"("void *, int, void *, void **");
        connect: "connect"("void *, void **, int, int, void *, void **");
        create_context: "createContext"("void *, ncclRmaConfig_v16_t *, void **");
        reg_mr_sym: "regMrSym"("void *, void *, size_t, int, uint64_t, void **");
        reg_mr_sym_dma_buf: "regMrSymDmaBuf"("void *, void *, size_t, int, uint64_t, int, uint64_t, void **");
        dereg_mr_sym: "deregMrSym"("void *, void *");
        destroy_context: "destroyContext"("void *");
        close_coll: "closeColl"("void *");
        close_listen: "closeListen"("void *");
        iput: "iput"("void *, int, uint64_t, void *, size_t, uint64_t, void *, uint32_t, uint32_t, void **");
        iput_signal: "iputSignal"("void *, int, uint64_t, void *, size_t, uint64_t, void *, uint32_t, uint64_t, void *, uint64_t, \
                                   uint32_t, bool, uint32_t, void **");
        iget: "iget"("void *, int, uint64_t, void *, size_t, uint64_t, void *, uint32_t, uint32_t, void **");
        iflush: "iflush"("void *, int, void *, uint32_t, void **");
        test: "test"("void *, void *, int *");
        rma_progress: "rmaProgress"("void *");
        query_last_error: "queryLastError"("void *, bool *");
        finalize: "finalize"("void *");
    });
    (fields, size_of::<Rma>())
}

#[test]
fn the_table_is_as_in_the_library() {
    compare("ncclRma_v16_t", rma());
}

#[test]
fn the_properties_are_as_in_the_library() {
    macro_rules! at {
        ($($field:ident: $name:literal $size:literal),+ $(,)?) => {
            vec![$(field($name, offset_of!(NetProperties, $field), $size)),+]
        };
    }
    let fields = at! {
        name: "name" 8, pci_path: "pciPath" 8, guid: "guid" 8, ptr_support: "ptrSupport" 4, reg_is_global: "regIsGlobal" 4,
        force_flush: "forceFlush" 4, speed: "speed" 4, port: "port" 4, latency: "latency" 4, max_comms: "maxComms" 4,
        max_recvs: "maxRecvs" 4, net_device_type: "netDeviceType" 4, net_device_version: "netDeviceVersion" 4,
        virtual_devices: "vProps" 36, max_p2p_bytes: "maxP2pBytes" 8, max_coll_bytes: "maxCollBytes" 8,
        max_multi_request_size: "maxMultiRequestSize" 4, rail_id: "railId" 2, plane_id: "planeId" 2,
    };
    compare("ncclNetProperties_v12_t", (fields, size_of::<NetProperties>()));
    let config = vec![
        field("nContexts", offset_of!(ContextConfig, contexts), 4),
        field("trafficClass", offset_of!(ContextConfig, traffic_class), 4),
        field("rankStride", offset_of!(ContextConfig, rank_stride), 4),
    ];
    compare("ncclRmaConfig_v14_t", (config, size_of::<ContextConfig>()));
    let promise = offset_of!(RmaProperties, flushes_all_puts_on_any_signal);
    compare(
        "ncclRmaProperties_v16_t",
        (vec![field("flushesAllPutsOnAnySignal", promise, 1)], size_of::<RmaProperties>()),
    );
}

#[test]
fn another_layout_is_seen() {
    let text = "/* offset      |    size */  type = struct s {\n\
                /*      0      |       8 */    const char *name;\n\
                /* XXX  4-byte hole      */\n\
                /*     16      |       8 */    ncclResult_t (*test)(void *, int *);\n\
                                               /* total size (bytes):   24 */\n";
    let right = (vec![field("name", 0, 8), function("test", 16, "void *, int *")], 24);
    assert_eq!(parse(text), right);
    for (from, to) in
        [("16  ", "12  "), ("8 */    const", "4 */    const"), ("int *", "int"), ("24 */", "32 */"), ("name", "nom")]
    {
        assert_ne!(parse(&text.replace(from, to)), right, "{from} as {to}");
    }
}

/// The plugin's file, which cargo puts next to the tests or a folder above.
fn built() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let name = "libnccl_loopback_plugin.so";
    let folders = own.ancestors().skip(1).take(2);
    let found: Vec<PathBuf> = folders.map(|folder| folder.join(name)).filter(|path| path.exists()).collect();
    found.first().unwrap_or_else(|| panic!("no {name} near {}", own.display())).clone()
}

#[test]
fn the_file_has_the_symbol_that_is_looked_up() {
    // SAFETY: the plugin has no initialisers.
    let library = unsafe { libloading::Library::new(built()) }.unwrap();
    // SAFETY: the table is a static; it lives as long as the library.
    let table = unsafe { *library.get::<*const Rma>(b"ncclRmaPlugin_v16\0").unwrap() };
    let (mut count, mut properties) = (0, std::mem::MaybeUninit::<NetProperties>::uninit());
    // SAFETY: a static table; places for results, of which the second is read only if it was written.
    unsafe {
        assert_eq!(std::ffi::CStr::from_ptr((*table).name), c"tide-loopback");
        assert_eq!(((*table).devices)(&mut count), 0);
        assert_eq!(((*table).get_properties)(0, properties.as_mut_ptr()), 0);
        assert_eq!(properties.assume_init().max_recvs, 8);
    }
    assert_eq!(count, 1);
    // SAFETY: looked up, not used.
    assert!(unsafe { library.get::<*const Rma>(b"ncclRmaPlugin_v99\0") }.is_err());
}
