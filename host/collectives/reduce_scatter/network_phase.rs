//! The network phase: rounds and landings, wave by wave [TIDE §4.2, App. E alg. 1 l. 10-21].

use super::{Call, ReduceScatter};
use crate::collectives::Scale;
use crate::collectives::rounds::{BlockRing, RoundsCall};
use crate::error::Result;
use crate::gpu::{Copy2d, DeviceSlice, Event, Fill2d, Launch, Stream};
use crate::plan::{Rank, Wave, latin_square, outbox};
use std::ops::Range;
use tide_device::abi::fault::WaitKind;
use tide_device::abi::kernel::Kernel;
use tide_device::abi::params::{LOCAL_RANKS_MAX, LandParams};

impl ReduceScatter {
    /// Sends and lands everything.
    pub(super) fn network_phase(&mut self, call: &mut Call<'_>) -> Result<()> {
        for pass in 0..self.plan.pass_count {
            for index in 0..self.plan.waves.len() {
                let wave = self.plan.waves[index].clone();
                self.open_wave(&wave, pass)?;
                self.send_wave(call, &wave, pass)?;
                self.close_wave(call, &wave, pass)?;
                call.done = self.land_wave(call, &wave, pass)?;
            }
        }
        Ok(())
    }

    /// Passes over the network before this one, over all calls; every pair of nodes exchanges one block in each.
    fn pass_sequence(&self, pass: u32) -> u64 {
        self.epoch * u64::from(self.plan.pass_count) + u64::from(pass)
    }

    /// The number of a wave over all calls.
    fn wave_sequence(&self, pass: u32, wave: u32) -> u64 {
        self.pass_sequence(pass) * self.plan.waves.len() as u64 + u64::from(wave)
    }

    /// The number of the wave that used this wave's generation before it, if one did.
    fn previous_on_generation(&self, pass: u32, wave: &Wave) -> Option<u64> {
        let (count, generations) = (self.plan.waves.len() as u32, self.plan.generation_count);
        if wave.index >= generations {
            return Some(self.wave_sequence(pass, wave.index - generations));
        }
        let last = (0..count).rev().find(|w| w % generations == wave.generation)?;
        self.wave_sequence(pass, 0).checked_sub(u64::from(count - last))
    }

    /// Makes a wave's inbox generation ready on every rank: landed before, and free of what no contributor overwrites.
    fn open_wave(&self, wave: &Wave, pass: u32) -> Result<()> {
        for rank in self.comm.driven().iter() {
            let stream = self.net_streams[self.comm.index(rank)];
            if let Some(previous) = self.previous_on_generation(pass, wave) {
                let why = (WaitKind::WaveLanded, self.place(wave.index));
                self.node.wait_node(stream, rank, self.regions.landed, previous + 1, why)?;
            }
            self.zero_stale_blocks(stream, rank, wave)?;
        }
        Ok(())
    }

    /// A wave's rounds on every rank: all at once where the outbox holds every block, else one by one, each followed by
    /// the sums that go into the blocks it has sent [TIDE App. E alg. 1 l. 12-18].
    fn send_wave(&mut self, call: &mut Call<'_>, wave: &Wave, pass: u32) -> Result<()> {
        let first = self.plan.waves[..wave.index as usize].iter().map(|w| w.rounds.len() as u32).sum();
        if self.plan.reads_never_wait() {
            return self.run_rounds(call, pass, first, &wave.rounds);
        }
        for (index, round) in wave.rounds.iter().enumerate() {
            self.run_rounds(call, pass, first + index as u32, std::slice::from_ref(round))?;
            // A round ends with a flush: the blocks it sent may be summed into again, in sending order.
            for rank in self.comm.driven().iter() {
                self.comm.join(self.net_streams[self.comm.index(rank)], [self.streams(rank).sum])?;
            }
            let sent = outbox::block_index(self.topology().node_count(), pass, round.end - 1) + 1;
            let holds = (sent + self.plan.outbox_block_count).min(self.plan.remote_block_count());
            for block in call.remote_sums.len() as u32..holds {
                self.sum_remote(call, block)?;
            }
            if call.read.is_empty() && call.remote_sums.len() as u32 == self.plan.remote_block_count() {
                self.record_reads(call)?;
            }
        }
        Ok(())
    }

    /// Consecutive rounds, behind the sums of what they send.
    fn run_rounds(&self, call: &Call<'_>, pass: u32, first: u32, rounds: &[Range<u32>]) -> Result<()> {
        let node_count = self.topology().node_count();
        for contributor in rounds.iter().cloned().flatten() {
            let block = outbox::block_index(node_count, pass, contributor);
            for rank in self.comm.driven().iter() {
                let sum = call.remote_sums[block as usize][self.comm.index(rank)];
                self.gpu().wait_event(self.net_streams[self.comm.index(rank)], sum)?;
            }
        }
        let bank_first = u64::from(call.bank) * u64::from(self.plan.outbox_block_count);
        let rounds = RoundsCall {
            epoch: self.epoch,
            sequence: self.pass_sequence(pass) + 1,
            blocks: BlockRing {
                source_shift: bank_first * self.plan.block_bytes(),
                block_first: u64::from(pass * (node_count - 1)),
                block_count: u64::from(self.plan.outbox_block_count.max(1)),
                block_bytes: self.plan.block_bytes(),
            },
            progress_first: 0,
            first,
            count: rounds.len() as u32,
        };
        self.rounds.run(&self.net_streams, &rounds)
    }

    /// Adds the own node's partial to its wave, and says that every rank's inbox holds the wave.
    fn close_wave(&self, call: &Call<'_>, wave: &Wave, pass: u32) -> Result<()> {
        for rank in self.comm.driven().iter() {
            let stream = self.net_streams[self.comm.index(rank)];
            if wave.has_own_node {
                self.gpu().wait_event(stream, call.own_sums[pass as usize][self.comm.index(rank)])?;
                self.copy_spare(stream, rank, wave, pass, call.bank)?;
            }
            self.node.raise_node(stream, rank, self.regions.arrived, self.wave_sequence(pass, wave.index) + 1)?;
        }
        Ok(())
    }

    /// Byte offset of a block in the inbox.
    fn inbox_offset(&self, generation: u32, sub_slice: u32) -> u64 {
        u64::from(generation * self.topology().local_rank_count() + sub_slice) * self.plan.block_bytes()
    }

    /// Zeroes what an earlier wave left in blocks of the wave's generation that this wave does not write (I1).
    fn zero_stale_blocks(&self, stream: Stream, rank: Rank, wave: &Wave) -> Result<()> {
        let (me, l) = (self.topology().local_of(rank).0, self.topology().local_rank_count());
        let bytes = self.plan.block_bytes();
        for distance in (0..l).filter(|d| wave.stale_mask >> d & 1 == 1) {
            let offset = self.inbox_offset(wave.generation, (me + distance) % l);
            let destination = self.arena.at(rank, self.regions.inbox, offset, bytes);
            let fill = Fill2d { destination, pitch_bytes: bytes, width_bytes: bytes, rows: 1, value: 0 };
            self.gpu().fill(stream, &fill)?;
        }
        Ok(())
    }

    /// Copies the own-node partial from its spare into the inbox, whose generation is free by now.
    fn copy_spare(&self, stream: Stream, rank: Rank, wave: &Wave, pass: u32, bank: u32) -> Result<()> {
        let topology = self.topology();
        let bytes = self.plan.block_bytes();
        if bytes == 0 {
            return Ok(());
        }
        let sub_slice = latin_square::sub_slice(topology, topology.local_of(rank), topology.node_count());
        let source = self.arena.at(rank, self.regions.spare, self.spare_offset(bank, pass), bytes);
        let offset = self.inbox_offset(wave.generation, sub_slice);
        let destination = self.arena.at(rank, self.regions.inbox, offset, bytes);
        self.gpu().copy(stream, &Copy2d::flat(destination, source, bytes))
    }

    /// Lands a wave on every rank once all local inboxes hold it, then returns the credits of its generation.
    fn land_wave(&self, call: &Call<'_>, wave: &Wave, pass: u32) -> Result<Vec<Event>> {
        let sequence = self.wave_sequence(pass, wave.index) + 1;
        let mut done = Vec::new();
        for rank in self.comm.driven().iter() {
            let stream = self.streams(rank).land;
            let why = (WaitKind::WaveArrived, self.place(wave.index));
            self.node.wait_node(stream, rank, self.regions.arrived, sequence, why)?;
            self.launch_land(stream, rank, call.ranks[self.comm.index(rank)].out, call.scale, wave, pass)?;
            done.push(self.gpu().record(stream)?);
            self.node.raise_node(stream, rank, self.regions.landed, sequence)?;
        }
        for rank in self.comm.driven().iter() {
            let stream = self.streams(rank).land;
            let why = (WaitKind::WaveLanded, self.place(wave.index));
            self.node.wait_node(stream, rank, self.regions.landed, sequence, why)?;
            self.rounds.return_credits(stream, rank, wave.index as usize, self.pass_sequence(pass) + 1)?;
        }
        Ok(done)
    }

    fn launch_land(
        &self,
        stream: Stream,
        rank: Rank,
        out: DeviceSlice,
        scale: Scale,
        wave: &Wave,
        pass: u32,
    ) -> Result<()> {
        let topology = self.topology();
        let geometry = &self.plan.geometry;
        let l = topology.local_rank_count();
        let (offset, bytes) = (self.inbox_offset(wave.generation, 0), u64::from(l) * self.plan.block_bytes());
        let mut inboxes = [0; LOCAL_RANKS_MAX];
        for (local, other) in self.arena.node_ranks(rank) {
            inboxes[local.0 as usize] = self.arena.at(other, self.regions.inbox, offset, bytes).0;
        }
        let multicast = self.arena.multicast(topology.node_of(rank), self.regions.inbox, offset, bytes);
        let is_single = self.plan.waves.len() == 1;
        let accumulator = if is_single {
            0
        } else {
            self.arena.at(rank, self.regions.accumulator, 0, self.regions.accumulator.bytes()).0
        };
        let params = LandParams {
            multicast: multicast.map_or(0, |m| m.0),
            inboxes,
            out: out.address.0,
            accumulator,
            packed_elems: geometry.packed_elems,
            sub_slice_elems: geometry.sub_slice_elems,
            part_first: u64::from(pass) * geometry.part_elems,
            part_elems: geometry.part_elems,
            local_rank_count: l,
            local_rank: topology.local_of(rank).0,
            holder_mask: u32::from(wave.holder_mask),
            first_wave: u32::from(wave.index == 0),
            last_wave: u32::from(wave.index as usize + 1 == self.plan.waves.len()),
            accumulate: u32::from(scale.accumulate),
            alpha: scale.alpha,
            reserved: 0,
        };
        let launch = Launch {
            kernel: if multicast.is_some() { Kernel::LandMultimem } else { Kernel::LandPeer },
            grid: self.plan.land_cta_count,
            block: self.gpu().properties(self.comm.device_of(rank)).shape.plain_threads,
            cluster: 1,
            shared_bytes: 0,
            params: bytemuck::bytes_of(&params),
        };
        // SAFETY: addresses of the arenas, which live as long as `self`; the output as checked by `check_gradients`.
        unsafe { self.gpu().launch(stream, &launch) }
    }
}
