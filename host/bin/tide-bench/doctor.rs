//! `tide-bench doctor`: what the machine has, what each lack costs, and what a cluster's connections would take.

use tide_gpu::plan::Topology;
use tide_gpu::plan::connections::Connections;

use crate::cli::DoctorArgs;
use crate::report::columns;

/// Prints the report; gives the exit status: 0 nothing is lacking, 10 it runs with fallbacks, 20 no GPU can be used.
pub fn report(arguments: &DoctorArgs) -> u8 {
    let status = machine();
    if let Some(nodes) = arguments.nodes {
        match Topology::new(nodes, arguments.gpus) {
            Ok(topology) => print!("{}", estimate(topology, arguments.contexts)),
            Err(error) => println!("# no estimate: {error}"),
        }
    }
    status
}

#[cfg(feature = "cuda")]
fn machine() -> u8 {
    use tide_gpu::gpu::cuda::doctor::{self, Verdict};
    let report = doctor::report();
    print!("{report}");
    match report.verdict() {
        Verdict::Pass => 0,
        Verdict::Warn => 10,
        Verdict::Fail => 20,
    }
}

#[cfg(not(feature = "cuda"))]
fn machine() -> u8 {
    println!("FAIL  build  lacks the feature `cuda`: no GPU can be used");
    20
}

/// What NCCL's connections take with one communicator of all ranks, and with one per rail [TIDE §6.1].
fn estimate(topology: Topology, context_count: u32) -> String {
    let (m, l) = (topology.node_count(), topology.local_rank_count());
    let head = ["communicator", "ranks", "QPs host RMA", "QPs GDAKI", "barrier steps", "queue bytes"];
    let row = |name: &str, c: Connections| {
        let numbers = [c.rank_count, c.host_queue_pairs, c.device_queue_pairs, c.barrier_steps, c.queue_bytes()];
        [name.to_owned()].into_iter().chain(numbers.map(|n| n.to_string())).collect()
    };
    let [all, rail] = Connections::before_and_after_split(topology, context_count);
    let rows = [head.map(str::to_owned).to_vec(), row("of all ranks", all), row("of a rail", rail)];
    let mut text = format!(
        "#\n# estimate for {m} nodes x {l} GPUs, {context_count} contexts, per GPU; host RMA or GDAKI, whichever is used:\n"
    );
    for line in columns(rows, &[0]) {
        text.push_str(&format!("#   {line}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_shows_both_sides_of_the_split() {
        let text = estimate(Topology::new(8, 8).unwrap(), 4);
        assert!(text.contains("of all ranks     64           512        260"), "{text}");
        assert!(text.contains("of a rail         8            64         36"), "{text}");
    }
}
