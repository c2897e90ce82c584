//! Network rounds, by either path: the tables that a registration uploads, and the calls that run a range of rounds for
//! every driven rank.

use super::Communicator;
use crate::error::Result;
use crate::gpu::{DeviceBuffer, Launch, Priority, Stream};
use crate::net::{HostPut, HostSignal, Net, Path, SignalKind};
use crate::plan::{Node, Rank};
use std::sync::Arc;
use tide_device::abi::fault::{Operation, WaitKind, WaitTag};
use tide_device::abi::params::{Credit, FinalizeParams, NO_SIGNAL, NetArrival, NetParams, NetPut, NetRank, NetRound};

/// One rank's part of a round.
#[derive(Debug, Clone, Default)]
pub(super) struct RankRound {
    pub(super) puts: Vec<NetPut>,
    pub(super) arrivals: Vec<NetArrival>,
    pub(super) wave: u32,
    pub(super) round: u32,
}

impl RankRound {
    /// Transfers sent: a put that signals ends one.
    fn transfer_count(&self) -> usize {
        self.puts.iter().filter(|put| put.signal != NO_SIGNAL).count()
    }
}

/// The ring of blocks that puts take their sources from; the fields are those of [`NetParams`].
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockRing {
    pub(super) source_shift: u64,
    pub(super) block_first: u64,
    pub(super) block_count: u64,
    pub(super) block_bytes: u64,
}

impl BlockRing {
    /// Sources that are no blocks.
    pub(super) const NONE: Self = Self { source_shift: 0, block_first: 0, block_count: 1, block_bytes: 0 };
}

/// What a launch of rounds needs to know besides the tables.
#[derive(Debug, Clone, Copy)]
pub(super) struct RoundsCall {
    pub(super) epoch: u64,
    /// Transfers that every pair has exchanged once this one is done.
    pub(super) sequence: u64,
    /// Where blocks lie; as in [`NetParams`].
    pub(super) blocks: BlockRing,
    /// What the progress words hold before.
    pub(super) progress_first: u64,
    pub(super) first: u32,
    pub(super) count: u32,
}

/// The rounds of one collective, and the network they go over.
pub(super) struct Rounds {
    comm: Communicator,
    net: Arc<dyn Net>,
    operation: Operation,
    /// Per driven rank, then per round.
    rounds: Vec<Vec<RankRound>>,
    /// Per driven rank, then per credit table.
    credits: Vec<Vec<Vec<Credit>>>,
    /// Device path: the uploaded credits, as `credits`.
    credit_tables: Vec<Vec<DeviceBuffer>>,
    launches: Vec<DeviceLaunch>,
}

/// The one launch that carries all ranks of a device.
struct DeviceLaunch {
    stream: Stream,
    ranks: Vec<Rank>,
    table: DeviceBuffer,
    warps: u32,
    _tables: Vec<DeviceBuffer>,
}

impl Rounds {
    /// Uploads the tables. `rounds` and `credits` are per rank; `progress` gives a rank's progress word, or null.
    pub(super) fn new(
        comm: &Communicator,
        net: &Arc<dyn Net>,
        operation: Operation,
        rounds: Vec<Vec<RankRound>>,
        credits: Vec<Vec<Vec<Credit>>>,
        progress: impl Fn(Rank) -> u64,
    ) -> Result<Self> {
        let mut this = Self {
            comm: comm.clone(),
            net: Arc::clone(net),
            operation,
            rounds,
            credits,
            credit_tables: Vec::new(),
            launches: Vec::new(),
        };
        if comm.options().path == Path::Device {
            this.upload_rounds(progress)?;
            this.upload_credits()?;
        }
        Ok(this)
    }

    fn upload_rounds(&mut self, progress: impl Fn(Rank) -> u64) -> Result<()> {
        let gpu = self.comm.gpu();
        let widest = self.rounds.iter().flatten().map(|r| r.transfer_count().max(r.arrivals.len())).max().unwrap_or(0);
        for device in self.comm.devices() {
            let ranks: Vec<Rank> = self.comm.driven().iter().filter(|r| self.comm.device_of(*r) == device).collect();
            let (mut tables, mut entries) = (Vec::new(), Vec::new());
            for &rank in &ranks {
                let (mut rounds, mut puts, mut arrivals) = (Vec::new(), Vec::new(), Vec::new());
                for round in &self.rounds[self.comm.index(rank)] {
                    rounds.push(NetRound {
                        put_first: puts.len() as u32,
                        put_count: round.puts.len() as u32,
                        arrival_first: arrivals.len() as u32,
                        arrival_count: round.arrivals.len() as u32,
                        wave: round.wave,
                        round: round.round,
                    });
                    puts.extend_from_slice(&round.puts);
                    arrivals.extend_from_slice(&round.arrivals);
                }
                let rounds = DeviceBuffer::from_slice(gpu, device, &rounds)?;
                let puts = DeviceBuffer::from_slice(gpu, device, &puts)?;
                let arrivals = DeviceBuffer::from_slice(gpu, device, &arrivals)?;
                entries.push(NetRank {
                    gin: self.net.handle(rank).0,
                    deadline: self.comm.deadline(rank),
                    rounds: rounds.address().0,
                    puts: puts.address().0,
                    arrivals: arrivals.address().0,
                    progress: progress(rank),
                    rank: rank.0,
                    local_rank_count: self.comm.topology().local_rank_count(),
                    operation: self.operation as u32,
                    reserved: 0,
                });
                tables.extend([rounds, puts, arrivals]);
            }
            // A warp per transfer of the widest round, as far as shared memory and a sensible block allow.
            let shared_bytes = gpu.properties(device).shared_bytes_max;
            let fitting = shared_bytes.checked_div(self.net.shared_bytes_per_warp()).unwrap_or(u32::MAX);
            let warps = (widest as u32).clamp(1, fitting.clamp(1, 8));
            let table = DeviceBuffer::from_slice(gpu, device, &entries)?;
            let stream = self.comm.create_device_stream(device, Priority::High)?;
            self.launches.push(DeviceLaunch { stream, ranks, table, warps, _tables: tables });
        }
        Ok(())
    }

    fn upload_credits(&mut self) -> Result<()> {
        for rank in self.comm.driven().iter() {
            let device = self.comm.device_of(rank);
            let upload = |credits: &Vec<Credit>| DeviceBuffer::from_slice(self.comm.gpu(), device, credits);
            let tables = self.credits[self.comm.index(rank)].iter().map(upload).collect::<Result<_>>()?;
            self.credit_tables.push(tables);
        }
        Ok(())
    }

    /// Runs a range of rounds on every rank, in its stream.
    pub(super) fn run(&self, streams: &[Stream], call: &RoundsCall) -> Result<()> {
        if call.count == 0 {
            return Ok(());
        }
        match self.comm.options().path {
            Path::Device => self.launch(streams, call),
            Path::Host => (call.first..call.first + call.count)
                .try_for_each(|round| self.enqueue_round(streams, round as usize, call)),
        }
    }

    fn launch(&self, streams: &[Stream], call: &RoundsCall) -> Result<()> {
        let gpu = self.comm.gpu();
        for launch in &self.launches {
            for rank in &launch.ranks {
                self.comm.join(streams[self.comm.index(*rank)], [launch.stream])?;
            }
            let params = self.params(call, launch.table.address().0);
            let warp_size = gpu.properties(self.comm.device_of(launch.ranks[0])).shape.warp_size;
            // SAFETY: the tables live as long as `self`, which outlives its work (see `Drop` of the collectives); all
            // ranks of the device are in this launch.
            unsafe {
                gpu.launch(
                    launch.stream,
                    &Launch {
                        kernel: self.net.rounds_kernel(),
                        grid: launch.ranks.len() as u32,
                        block: launch.warps * warp_size,
                        cluster: 1,
                        shared_bytes: launch.warps * self.net.shared_bytes_per_warp(),
                        params: bytemuck::bytes_of(&params),
                    },
                )?;
            }
            self.comm.join(launch.stream, launch.ranks.iter().map(|r| streams[self.comm.index(*r)]))?;
        }
        Ok(())
    }

    fn params(&self, call: &RoundsCall, ranks: u64) -> NetParams {
        NetParams {
            ranks,
            epoch: call.epoch,
            sequence: call.sequence,
            source_shift: call.blocks.source_shift,
            block_first: call.blocks.block_first,
            block_count: call.blocks.block_count,
            block_bytes: call.blocks.block_bytes,
            progress_first: call.progress_first,
            round_first: call.first,
            round_count: call.count,
            stripe_bytes: self.comm.options().stripe_bytes,
        }
    }

    /// One round on the host path: all ranks' puts, then all ranks' waits.
    fn enqueue_round(&self, streams: &[Stream], round: usize, call: &RoundsCall) -> Result<()> {
        let params = self.params(call, 0);
        for rank in self.comm.driven().iter() {
            let stream = streams[self.comm.index(rank)];
            for put in &self.rounds[self.comm.index(rank)][round].puts {
                let to = Node(put.peer);
                let tag = |kind| self.tag(rank, to, round, call.epoch, kind);
                let value = call.sequence.wrapping_sub(u64::from(put.credit_ahead));
                let credit = HostSignal { kind: SignalKind::Credit, word: put.credit, value };
                self.net.wait(stream, rank, to, credit, tag(WaitKind::Credit))?;
                if put.pace != NO_SIGNAL {
                    let pace = HostSignal { kind: SignalKind::Pace, word: put.pace, value: call.sequence };
                    self.net.wait(stream, rank, to, pace, tag(WaitKind::Pace))?;
                }
                let source_offset = params.source_offset(put);
                let lead = (put.lead_contexts > 0).then_some((0, put.lead_bytes, SignalKind::Lead, put.lead_signal));
                let rest = (put.lead_bytes, put.bytes, SignalKind::Data, put.signal);
                for (first, end, kind, word) in lead.into_iter().chain([rest]) {
                    let [apart, rest] = put.pieces(source_offset, first, end - first);
                    self.net.put(stream, &HostPut { from: rank, to, piece: apart, signal: None })?;
                    let signal = (word != NO_SIGNAL).then_some(HostSignal { kind, word, value: call.sequence });
                    self.net.put(stream, &HostPut { from: rank, to, piece: rest, signal })?;
                }
            }
        }
        for rank in self.comm.driven().iter() {
            let stream = streams[self.comm.index(rank)];
            for arrival in &self.rounds[self.comm.index(rank)][round].arrivals {
                let from = Node(arrival.peer);
                let tag = self.tag(rank, from, round, call.epoch, WaitKind::Arrival);
                let signal = |kind, word| HostSignal { kind, word, value: call.sequence };
                if arrival.lead_contexts > 0 {
                    self.net.wait(stream, rank, from, signal(SignalKind::Lead, arrival.lead_signal), tag)?;
                }
                if arrival.pace_signal != NO_SIGNAL {
                    let pace = signal(SignalKind::Pace, arrival.pace_signal);
                    self.net.signal(stream, rank, Node(arrival.pace_peer), pace)?;
                }
                self.net.wait(stream, rank, from, signal(SignalKind::Data, arrival.signal), tag)?;
            }
        }
        Ok(())
    }

    fn tag(&self, rank: Rank, peer: Node, round: usize, epoch: u64, kind: WaitKind) -> WaitTag {
        let topology = self.comm.topology();
        let place = &self.rounds[self.comm.index(rank)][round];
        WaitTag {
            kind: kind as u32,
            operation: self.operation as u32,
            rank: rank.0,
            peer: topology.rank(peer, topology.local_of(rank)).0,
            wave: place.wave,
            round: place.round,
            epoch,
        }
    }

    /// Returns the credits of a table to the peers of a rank: raises them to `value`, one more than before.
    pub(super) fn return_credits(&self, stream: Stream, rank: Rank, table: usize, value: u64) -> Result<()> {
        let credits = &self.credits[self.comm.index(rank)][table];
        if credits.is_empty() {
            return Ok(());
        }
        if self.comm.options().path == Path::Host {
            return credits.iter().try_for_each(|c| {
                let signal = HostSignal { kind: SignalKind::Credit, word: c.signal, value };
                self.net.signal(stream, rank, Node(c.peer), signal)
            });
        }
        let gpu = self.comm.gpu();
        let params = FinalizeParams {
            gin: self.net.handle(rank).0,
            deadline: self.comm.deadline(rank),
            credits: self.credit_tables[self.comm.index(rank)][table].address().0,
            credit_count: credits.len() as u32,
            rank: rank.0,
        };
        // SAFETY: the table lives as long as `self`.
        unsafe {
            gpu.launch(
                stream,
                &Launch {
                    kernel: self.net.finalize_kernel(),
                    grid: 1,
                    block: gpu.properties(self.comm.device_of(rank)).shape.warp_size,
                    cluster: 1,
                    shared_bytes: self.net.shared_bytes_per_warp(),
                    params: bytemuck::bytes_of(&params),
                },
            )
        }
    }

    /// The streams that the rounds own.
    pub(super) fn streams(&self) -> impl Iterator<Item = Stream> + '_ {
        self.launches.iter().map(|l| l.stream)
    }
}
