//! Which rank this process is: read from what its launcher set in the environment.
//!
//! Four launchers are known, in this order: `tide-bench --spawn`, torchrun, srun, mpirun. The variables of several may be set
//! at once, as launchers hand on what they inherit. They are held against each other:
//!
//! * Claims of the same number of ranks must name the same rank (and local rank). The first in the order above is used.
//! * A claim of fewer ranks is that of a launcher further out, which started one process per node: torchrun or `--spawn` below
//!   srun, the daemons of mpirun below srun. It must be further out in fact (srun, then mpirun, then torchrun, then `--spawn`),
//!   must have started one process per node, and on no more nodes than the finer claim has. Its rank is not compared: torchrun
//!   may number nodes in another order. The finer claim is used.
//! * Anything else is a contradiction, and an error that names both.
//!
//! `SLURM_PROCID` in a batch script (a job's number, but no `SLURM_STEP_*`) is no claim: the script is no task of a step.
//! `PMIX_RANK` or `PMI_RANK` beside srun is srun's own (`--mpi=pmix`), and must be its rank.
//! A variable that is set to nothing counts as not set.

use std::fmt;

use super::agreement::{Facts, agree};
use super::exchange::Exchange;
use super::phrase::shown;
use crate::error::{Result, TideError};

/// Where variables are read: for the real environment `&|name| std::env::var(name).ok()`.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The most ranks of a job.
pub(crate) const RANK_COUNT_MAX: u32 = 1 << 16;

/// The first port that is derived from a Slurm job's number, and how many there are: below the ports that Linux hands out.
const SLURM_PORT_FIRST: u64 = 23_000;
const SLURM_PORT_COUNT: u64 = 8_192;

/// What started the processes of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// This library, by [`spawn`](fn@super::spawn::spawn).
    Spawn,
    /// PyTorch's.
    Torchrun,
    /// Slurm's.
    Srun,
    /// Open MPI's, or another that sets `PMI_RANK`.
    Mpirun,
}

impl Launcher {
    /// How far in it stands where launchers start each other: srun is outermost.
    fn depth(self) -> u32 {
        match self {
            Self::Srun => 0,
            Self::Mpirun => 1,
            Self::Torchrun => 2,
            Self::Spawn => 3,
        }
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Spawn => "--spawn",
            Self::Torchrun => "torchrun",
            Self::Srun => "srun",
            Self::Mpirun => "mpirun",
        })
    }
}

/// Which of a job's processes this one is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// What said so.
    pub launcher: Launcher,
    /// Rank among all processes.
    pub rank: u32,
    /// Number of processes.
    pub rank_count: u32,
    /// Rank among the processes of this node.
    pub local_rank: u32,
    /// Number of processes on this node.
    pub local_rank_count: u32,
    /// `host:port` at which rank 0 is to listen: `TIDE_COMM_ID` if it is set. Else what the launcher implies: under torchrun
    /// `MASTER_ADDR` and the port after `MASTER_PORT`, which itself is taken by torchrun's store; under srun the step's first
    /// node and a port derived from the job's and step's number; under mpirun nothing.
    pub rendezvous: Option<String>,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { launcher, rank, rank_count, local_rank, local_rank_count, rendezvous } = self;
        write!(f, "{launcher}: rank {rank} of {rank_count}, local rank {local_rank} of {local_rank_count}")?;
        match rendezvous {
            Some(address) => write!(f, ", rank 0 at {address}"),
            None => Ok(()),
        }
    }
}

impl Placement {
    /// What the environment says; `None` if no launcher started this process.
    ///
    /// Whether all nodes have equally many ranks cannot be seen by every rank alone: see [`Self::agree`].
    ///
    /// # Errors
    /// [`TideError::Usage`] that names variable and value: a variable that is missing beside others of its launcher, is no
    /// number, or is out of range; or two launchers that contradict each other.
    pub fn detect(env: Environment) -> Result<Option<Self>> {
        let env = Variables(env);
        let claims: Vec<_> =
            [spawn(&env)?, torchrun(&env)?, srun(&env)?, mpirun(&env)?].into_iter().flatten().collect();
        for (i, a) in claims.iter().enumerate() {
            if let Some(b) = claims[i + 1..].iter().find(|b| a.contradicts(b)) {
                return Err(TideError::usage(format!(
                    "{} and {} contradict each other: {}, but {}; unset the variables of the one that did not start this process",
                    a.launcher, b.launcher, a.evidence, b.evidence
                )));
            }
        }
        // Of equal counts the first: `max_by_key` would give the last.
        let used = claims.iter().filter(|c| c.local.is_some()).rev().max_by_key(|c| c.rank_count);
        let Some((claim, (local_rank, local_rank_count), rank_count)) =
            used.and_then(|c| Some((c, c.local?, c.rank_count?)))
        else {
            return match claims.first() {
                None => Ok(None),
                Some(partial) => Err(TideError::usage(format!(
                    "{} says {}, but not how many ranks there are in all and on this node",
                    partial.launcher, partial.evidence
                ))),
            };
        };
        let rendezvous = match env.get("TIDE_COMM_ID") {
            Some(address) => {
                check_address("TIDE_COMM_ID", &address)?;
                Some(address)
            }
            None => match claim.launcher {
                Launcher::Torchrun => torchrun_rendezvous(&env)?,
                Launcher::Srun => srun_rendezvous(&env)?,
                Launcher::Spawn | Launcher::Mpirun => None,
            },
        };
        Ok(Some(Self {
            launcher: claim.launcher,
            rank: claim.rank,
            rank_count,
            local_rank,
            local_rank_count,
            rendezvous,
        }))
    }

    /// The node of this rank, where all nodes have equally many ([`Self::agree`]).
    pub fn node(&self) -> u32 {
        self.rank / self.local_rank_count
    }

    /// The number of nodes, where all have equally many ranks ([`Self::agree`]).
    pub fn node_count(&self) -> u32 {
        self.rank_count.div_ceil(self.local_rank_count)
    }

    /// Compares the placements of all ranks: each node has equally many, and rank `r` is local rank `r mod L` of its node.
    /// Every rank gets the same answer.
    ///
    /// # Errors
    /// [`TideError::Disagreement`] with the numbers of ranks per node; [`TideError::Usage`] if ranks are not numbered node by
    /// node; as [`Exchange::all_gather`].
    pub fn agree(&self, exchange: &mut (impl Exchange + ?Sized)) -> Result<()> {
        let facts = Facts::new()
            .with("the number of ranks", self.rank_count)
            .with("the number of ranks on a node", self.local_rank_count);
        agree(exchange, "placement", &facts)?;
        let (count, local_count) = (self.rank_count, self.local_rank_count);
        if !count.is_multiple_of(local_count) {
            return Err(TideError::usage(format!(
                "{count} ranks cannot be spread over nodes of {local_count} ranks each"
            )));
        }
        let local_ranks = exchange.all_gather("local ranks", &self.local_rank.to_le_bytes())?;
        for (rank, bytes) in (0..).zip(&local_ranks) {
            let expected: u32 = rank % local_count;
            if bytes[..] != expected.to_le_bytes() {
                let found =
                    <[u8; 4]>::try_from(&bytes[..]).map_or("none".to_owned(), |b| u32::from_le_bytes(b).to_string());
                return Err(TideError::usage(format!(
                    "ranks must be numbered node by node: rank {rank} has local rank {found} of {local_count}, not {expected} \
                     (srun: --distribution=block; mpirun: --map-by ppr:{local_count}:node --rank-by slot)"
                )));
            }
        }
        Ok(())
    }
}

/// What one launcher's variables say.
struct Claim {
    launcher: Launcher,
    rank: u32,
    /// `PMIX_RANK` comes without it.
    rank_count: Option<u32>,
    /// Local rank and number of local ranks; PMI comes without them.
    local: Option<(u32, u32)>,
    /// The variables, as a sentence shows them.
    evidence: String,
}

impl Claim {
    fn contradicts(&self, other: &Self) -> bool {
        let (Some(a), Some(b)) = (self.rank_count, other.rank_count) else {
            // A bare rank is srun's own if anybody's.
            return (self.launcher == Launcher::Srun || other.launcher == Launcher::Srun) && self.rank != other.rank;
        };
        if a == b {
            return self.rank != other.rank || matches!((self.local, other.local), (Some(a), Some(b)) if a != b);
        }
        let (coarse, fine) = if a < b { (self, other) } else { (other, self) };
        let node_count = fine.local.map_or(a.max(b), |(_, local_count)| a.max(b).div_ceil(local_count));
        let one_per_node = coarse.local.is_none_or(|(_, local_count)| local_count == 1);
        coarse.launcher.depth() > fine.launcher.depth() || !one_per_node || a.min(b) > node_count
    }
}

/// The environment, and numbers in it.
struct Variables<'a>(Environment<'a>);

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn number(&self, name: &str) -> Result<Option<u32>> {
        self.get(name).map(|value| number(name, &value, &value)).transpose()
    }

    /// A claim of four variables: rank, number of ranks, local rank, number of local ranks. `None` if none is set.
    fn claim(&self, launcher: Launcher, names: [&str; 4]) -> Result<Option<Claim>> {
        let values = names.iter().map(|name| self.number(name)).collect::<Result<Vec<_>>>()?;
        let Some(set) = values.iter().position(Option::is_some) else { return Ok(None) };
        let [Some(rank), Some(rank_count), Some(local_rank), Some(local_rank_count)] = values[..] else {
            let missing: Vec<_> = names.into_iter().zip(&values).filter(|(_, v)| v.is_none()).map(|(n, _)| n).collect();
            let value = values[set].unwrap_or_default();
            return Err(TideError::usage(format!(
                "{}={value} is set, as {launcher} does, but {} is not",
                names[set],
                missing.join(", ")
            )));
        };
        check_below((names[0], rank), (names[1], rank_count))?;
        check_below((names[2], local_rank), (names[3], local_rank_count))?;
        if local_rank_count > rank_count {
            return Err(TideError::usage(format!(
                "{}={local_rank_count} is more than {}={rank_count}",
                names[3], names[1]
            )));
        }
        let evidence = format!(
            "{}={rank} {}={rank_count} {}={local_rank} {}={local_rank_count}",
            names[0], names[1], names[2], names[3]
        );
        let (rank_count, local) = (Some(rank_count), Some((local_rank, local_rank_count)));
        Ok(Some(Claim { launcher, rank, rank_count, local, evidence }))
    }
}

/// `text`, a part of the value of `name`, as a number.
fn number(name: &str, value: &str, text: &str) -> Result<u32> {
    text.parse()
        .ok()
        .filter(|n| *n <= RANK_COUNT_MAX && text.bytes().all(|b| b.is_ascii_digit()))
        .ok_or_else(|| unreadable(name, value, &format!("needed: a number up to {RANK_COUNT_MAX}")))
}

fn unreadable(name: &str, value: &str, why: &str) -> TideError {
    TideError::usage(format!("{name}={}: {why}", shown(value, 80)))
}

fn check_below((name, value): (&str, u32), (limit_name, limit): (&str, u32)) -> Result<()> {
    if value >= limit {
        return Err(TideError::usage(format!("{name}={value} is not below {limit_name}={limit}")));
    }
    Ok(())
}

/// That the value of `name` is `host:port`, where an IPv6 address stands in brackets.
pub(crate) fn check_address(name: &str, address: &str) -> Result<()> {
    let valid = address.rsplit_once(':').is_some_and(|(host, port)| {
        let named = !host.is_empty() && !host.contains([':', '/', '[', ']']) && !host.contains(char::is_whitespace);
        let literal = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let digits = port.bytes().all(|b| b.is_ascii_digit());
        (named || literal.is_some_and(|h| h.parse::<std::net::Ipv6Addr>().is_ok()))
            && digits
            && port.parse::<u16>().is_ok_and(|p| p != 0)
    });
    if valid { Ok(()) } else { Err(unreadable(name, address, "needed: host:port, or [IPv6 address]:port")) }
}

fn spawn(env: &Variables) -> Result<Option<Claim>> {
    env.claim(Launcher::Spawn, ["TIDE_RANK", "TIDE_RANK_COUNT", "TIDE_LOCAL_RANK", "TIDE_LOCAL_RANK_COUNT"])
}

fn torchrun(env: &Variables) -> Result<Option<Claim>> {
    env.claim(Launcher::Torchrun, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
}

fn torchrun_rendezvous(env: &Variables) -> Result<Option<String>> {
    let (host, port) = match (env.get("MASTER_ADDR"), env.get("MASTER_PORT")) {
        (None, None) => return Ok(None),
        (Some(host), Some(port)) => (host, port),
        (Some(host), None) => return Err(unreadable("MASTER_ADDR", &host, "MASTER_PORT is not set beside it")),
        (None, Some(port)) => return Err(unreadable("MASTER_PORT", &port, "MASTER_ADDR is not set beside it")),
    };
    let why = "needed: a port whose successor is free for this job, 1 to 65534; or set TIDE_COMM_ID=host:port";
    let next = port.parse::<u16>().ok().filter(|p| *p != 0).and_then(|p| p.checked_add(1));
    let next = next.ok_or_else(|| unreadable("MASTER_PORT", &port, why))?;
    // torchrun sets an IPv6 address without brackets.
    let bracketed = if host.parse::<std::net::Ipv6Addr>().is_ok() { format!("[{host}]") } else { host.clone() };
    let address = format!("{bracketed}:{next}");
    match check_address("MASTER_ADDR", &address) {
        Ok(()) => Ok(Some(address)),
        Err(_) => Err(unreadable("MASTER_ADDR", &host, "needed: a host name or an address")),
    }
}

fn srun(env: &Variables) -> Result<Option<Claim>> {
    let Some(rank) = env.number("SLURM_PROCID")? else { return Ok(None) };
    let of_step = ["SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"];
    if env.get("SLURM_JOB_ID").is_some() && of_step.iter().all(|name| env.get(name).is_none()) {
        return Ok(None);
    }
    let missing = |name: &str| TideError::usage(format!("SLURM_PROCID={rank} is set, as srun does, but {name} is not"));
    // SLURM_NTASKS may be the allocation's.
    let count_name = if env.get("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let rank_count = env.number(count_name)?.ok_or_else(|| missing("SLURM_NTASKS"))?;
    let local_rank = env.number("SLURM_LOCALID")?.ok_or_else(|| missing("SLURM_LOCALID"))?;
    let per_node = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    let (name, value) = per_node
        .iter()
        .find_map(|name| env.get(name).map(|value| (*name, value)))
        .ok_or_else(|| missing("SLURM_STEP_TASKS_PER_NODE"))?;
    let runs = tasks_per_node(name, &value)?;
    let local_rank_count = match runs[..] {
        [(count, _)] => count,
        _ => {
            let node = env.number("SLURM_NODEID")?.ok_or_else(|| missing("SLURM_NODEID"))?;
            let mut first = 0;
            let of_node = runs.iter().find(|(_, node_count)| {
                first += u64::from(*node_count);
                u64::from(node) < first
            });
            let found =
                of_node.ok_or_else(|| unreadable(name, &value, &format!("it has no node SLURM_NODEID={node}")))?;
            found.0
        }
    };
    check_below(("SLURM_PROCID", rank), (count_name, rank_count))?;
    check_below(("SLURM_LOCALID", local_rank), (name, local_rank_count))?;
    if local_rank_count > rank_count {
        return Err(unreadable(name, &value, &format!("more on a node than {count_name}={rank_count}")));
    }
    let evidence = format!(
        "SLURM_PROCID={rank} {count_name}={rank_count} SLURM_LOCALID={local_rank} {name}={}",
        shown(&value, 80)
    );
    let (rank_count, local) = (Some(rank_count), Some((local_rank, local_rank_count)));
    Ok(Some(Claim { launcher: Launcher::Srun, rank, rank_count, local, evidence }))
}

/// `8(x2),4` as (tasks on a node, nodes in a row with so many).
fn tasks_per_node(name: &str, value: &str) -> Result<Vec<(u32, u32)>> {
    let form = "needed: numbers of tasks per node, as 8(x2),4";
    value
        .split(',')
        .map(|item| {
            let (count, nodes) = match item.split_once("(x") {
                None => (item, "1"),
                Some((count, rest)) => (count, rest.strip_suffix(')').ok_or_else(|| unreadable(name, value, form))?),
            };
            let (count, nodes) = (number(name, value, count), number(name, value, nodes));
            match (count, nodes) {
                (Ok(count), Ok(nodes)) if count > 0 && nodes > 0 => Ok((count, nodes)),
                _ => Err(unreadable(name, value, form)),
            }
        })
        .collect()
}

fn srun_rendezvous(env: &Variables) -> Result<Option<String>> {
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let Some((name, list)) = lists.iter().find_map(|name| env.get(name).map(|list| (*name, list))) else {
        return Ok(None);
    };
    let Some(job) = env.get("SLURM_JOB_ID") else { return Ok(None) };
    let step = env.get("SLURM_STEP_ID").unwrap_or_else(|| "0".to_owned());
    let id = |name: &str, value: &str| value.parse::<u64>().map_err(|_| unreadable(name, value, "needed: a number"));
    let (job, step) = (id("SLURM_JOB_ID", &job)?, id("SLURM_STEP_ID", &step)?);
    let host = first_host(&list)
        .ok_or_else(|| unreadable(name, &list, "needed: a list of hosts, as node[003-010,12],login1"))?;
    // Steps of one job that run at once get ports of their own; so do jobs with numbers close to each other.
    let port = SLURM_PORT_FIRST + job.wrapping_mul(31).wrapping_add(step) % SLURM_PORT_COUNT;
    Ok(Some(format!("{host}:{port}")))
}

/// The first host of a list such as `node[003-010,12],login1`; brackets may come more than once.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        if !rest[end..].starts_with('[') {
            break;
        }
        let (inside, after) = rest[end + 1..].split_once(']')?;
        let first =
            inside.split([',', '-']).next().filter(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))?;
        host.push_str(first);
        rest = after;
    }
    let valid = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    (!host.is_empty() && host.bytes().all(valid)).then_some(host)
}

fn mpirun(env: &Variables) -> Result<Option<Claim>> {
    let open_mpi = env.claim(
        Launcher::Mpirun,
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    )?;
    let pmix = env.number("PMIX_RANK")?;
    let pmi = env.number("PMI_RANK")?;
    if let Some(claim) = open_mpi {
        for (name, rank) in [("PMIX_RANK", pmix), ("PMI_RANK", pmi)] {
            if rank.is_some_and(|rank| rank != claim.rank) {
                let rank = rank.unwrap_or_default();
                return Err(TideError::usage(format!("{name}={rank} contradicts {}", claim.evidence)));
            }
        }
        return Ok(Some(claim));
    }
    if let Some(rank) = pmi {
        let Some(rank_count) = env.number("PMI_SIZE")? else {
            return Err(TideError::usage(format!("PMI_RANK={rank} is set, as mpirun does, but PMI_SIZE is not")));
        };
        // MPICH's launcher sets these beside PMI's.
        if env.get("MPI_LOCALRANKID").is_some() {
            return env.claim(Launcher::Mpirun, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]);
        }
        check_below(("PMI_RANK", rank), ("PMI_SIZE", rank_count))?;
        let evidence = format!("PMI_RANK={rank} PMI_SIZE={rank_count}");
        return Ok(Some(Claim {
            launcher: Launcher::Mpirun,
            rank,
            rank_count: Some(rank_count),
            local: None,
            evidence,
        }));
    }
    let bare = |rank| {
        let evidence = format!("PMIX_RANK={rank}");
        Claim { launcher: Launcher::Mpirun, rank, rank_count: None, local: None, evidence }
    };
    Ok(pmix.map(bare))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `A=1 B=2`, as an environment has it.
    fn detect(variables: &str) -> Result<Option<Placement>> {
        let env = |name: &str| {
            let mut pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
            pairs.find(|(n, _)| *n == name).map(|(_, value)| value.to_owned())
        };
        Placement::detect(&env)
    }

    const TORCHRUN: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node1 MASTER_PORT=29500";
    const SRUN: &str = "SLURM_JOB_ID=100 SLURM_STEP_ID=2 SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8 \
                        SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NODELIST=node[003-004]";
    /// One task on each of two nodes, this one on the second.
    const SRUN_NODES: &str = "SLURM_JOB_ID=100 SLURM_STEP_ID=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 \
                              SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_STEP_NODELIST=node[003-004]";
    /// What a batch script of 16 tasks has.
    const SBATCH: &str = "SLURM_JOB_ID=100 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=16 SLURM_TASKS_PER_NODE=8(x2)";
    const MPIRUN: &str = "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                          OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=5";
    const SPAWN: &str = "TIDE_RANK=5 TIDE_RANK_COUNT=8 TIDE_LOCAL_RANK=1 TIDE_LOCAL_RANK_COUNT=4 TIDE_COMM_ID=a:1";

    #[test]
    fn each_launcher_is_understood() {
        use Launcher::{Mpirun, Spawn, Srun, Torchrun};
        // 23000 + 31 · job + step.
        let first = "node003:26102".to_owned();
        let uneven = "SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=6 SLURM_STEP_TASKS_PER_NODE=4,2 SLURM_NODEID=1";
        let plain = "SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8 SLURM_NTASKS_PER_NODE=4";
        let hydra = "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4";
        for (variables, launcher, (rank, rank_count, local_rank, local_rank_count), rendezvous) in [
            (TORCHRUN.to_owned(), Torchrun, (5, 8, 1, 4), Some("node1:29501")),
            (format!("{TORCHRUN} TIDE_COMM_ID=b:7"), Torchrun, (5, 8, 1, 4), Some("b:7")),
            (TORCHRUN.replace("node1", "fe80::1"), Torchrun, (5, 8, 1, 4), Some("[fe80::1]:29501")),
            ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1".to_owned(), Torchrun, (0, 1, 0, 1), None),
            (SRUN.to_owned(), Srun, (5, 8, 1, 4), Some(&first)),
            (format!("{SRUN} TIDE_COMM_ID=[::1]:7"), Srun, (5, 8, 1, 4), Some("[::1]:7")),
            (plain.to_owned(), Srun, (5, 8, 1, 4), None),
            (uneven.to_owned(), Srun, (5, 6, 1, 2), None),
            (MPIRUN.to_owned(), Mpirun, (5, 8, 1, 4), None),
            (hydra.to_owned(), Mpirun, (5, 8, 1, 4), None),
            (SPAWN.to_owned(), Spawn, (5, 8, 1, 4), Some("a:1")),
        ] {
            let expected = Placement {
                launcher,
                rank,
                rank_count,
                local_rank,
                local_rank_count,
                rendezvous: rendezvous.map(str::to_owned),
            };
            assert_eq!(detect(&variables).unwrap(), Some(expected), "{variables}");
        }
        for nothing in ["", "RANK= WORLD_SIZE=", "MASTER_ADDR=a MASTER_PORT=1", SBATCH, "TIDE_COMM_ID=a:1"] {
            assert_eq!(detect(nothing).unwrap(), None, "{nothing}");
        }
    }

    #[test]
    fn launchers_within_each_other_are_understood() {
        use Launcher::{Mpirun, Spawn, Srun, Torchrun};
        for (variables, used) in [
            // One torchrun per node; it may number the nodes otherwise than srun.
            (format!("{SRUN_NODES} {TORCHRUN}"), Torchrun),
            (format!("{} {TORCHRUN}", SRUN_NODES.replace("PROCID=1", "PROCID=0")), Torchrun),
            // A step per node, each with one torchrun.
            (
                format!("{} {TORCHRUN}", SRUN_NODES.replace("PROCID=1", "PROCID=0").replace("NTASKS=2", "NTASKS=1")),
                Torchrun,
            ),
            (format!("{SBATCH} {TORCHRUN}"), Torchrun),
            (format!("{SBATCH} {MPIRUN}"), Mpirun),
            // The daemons of mpirun on all nodes but the first.
            (
                format!("{} {MPIRUN}", SRUN_NODES.replace("PROCID=1", "PROCID=0").replace("NTASKS=2", "NTASKS=1")),
                Mpirun,
            ),
            (format!("{SRUN_NODES} {SPAWN}"), Spawn),
            (format!("{SRUN_NODES} {TORCHRUN} {SPAWN}"), Spawn),
            // --mpi=pmix, --mpi=pmi2: both are srun's own.
            (format!("{SRUN} PMIX_RANK=5"), Srun),
            (format!("{SRUN} PMI_RANK=5 PMI_SIZE=8"), Srun),
            (format!("{SRUN_NODES} PMIX_RANK=1 {TORCHRUN}"), Torchrun),
            // All say the same.
            (format!("{SRUN} {TORCHRUN}"), Torchrun),
            (format!("{SRUN} {MPIRUN}"), Srun),
        ] {
            let placement = detect(&variables).unwrap_or_else(|e| panic!("{variables}: {e}")).unwrap();
            assert_eq!((placement.launcher, placement.rank, placement.rank_count), (used, 5, 8), "{variables}");
        }
    }

    #[test]
    fn contradictions_name_both_launchers() {
        for (variables, names) in [
            // The same number of ranks, another rank; or the same rank, another local one.
            (format!("{} {TORCHRUN}", SRUN.replace("PROCID=5", "PROCID=4")), ["torchrun", "srun"]),
            (format!("{} {TORCHRUN}", SRUN.replace("LOCALID=1", "LOCALID=2")), ["torchrun", "srun"]),
            (format!("{} {SRUN}", MPIRUN.replace("=5", "=4")), ["srun", "mpirun"]),
            (format!("{TORCHRUN} {}", MPIRUN.replace("=5", "=4")), ["torchrun", "mpirun"]),
            (format!("{TORCHRUN} {}", SPAWN.replace("RANK=5", "RANK=4")), ["--spawn", "torchrun"]),
            // Several tasks on a node, each with a torchrun.
            (
                format!("{} {TORCHRUN}", SRUN_NODES.replace("1(x2)", "2").replace("PROCID=1", "PROCID=0")),
                ["torchrun", "srun"],
            ),
            // A torchrun of its own world in each task.
            (format!("{SRUN} RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"), ["torchrun", "srun"]),
            // More nodes for srun than for torchrun.
            (format!("{SRUN_NODES} RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4"), ["torchrun", "srun"]),
            (format!("{SRUN} PMIX_RANK=4"), ["srun", "mpirun"]),
            (format!("{SRUN} PMI_RANK=4 PMI_SIZE=8"), ["srun", "mpirun"]),
        ] {
            let text = detect(&variables).expect_err(&variables).to_string();
            assert!(text.starts_with(&format!("{} and {} contradict", names[0], names[1])), "{variables}: {text}");
        }
        let text = detect(&MPIRUN.replace("PMIX_RANK=5", "PMIX_RANK=4")).unwrap_err().to_string();
        assert!(text.contains("PMIX_RANK=4 contradicts OMPI_COMM_WORLD_RANK=5"), "{text}");
    }

    #[test]
    fn what_cannot_be_used_is_named_with_its_value() {
        let long = "9".repeat(300);
        for (variables, expected) in [
            (TORCHRUN.replace("RANK=5 ", "RANK=x5 "), "RANK=x5: needed: a number"),
            (TORCHRUN.replace("RANK=5 ", "RANK=-1 "), "RANK=-1: needed"),
            (TORCHRUN.replace("RANK=5 ", "RANK=+5 "), "RANK=+5: needed"),
            (TORCHRUN.replace("SIZE=8", "SIZE=4294967296"), "WORLD_SIZE=4294967296: needed"),
            (TORCHRUN.replace("RANK=5 ", "RANK=8 "), "RANK=8 is not below WORLD_SIZE=8"),
            (TORCHRUN.replace("LOCAL_RANK=1", "LOCAL_RANK=4"), "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
            (
                TORCHRUN.replace("LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE=9"),
                "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8",
            ),
            (TORCHRUN.replace("WORLD_SIZE=8", "WORLD_SIZE=0"), "RANK=5 is not below WORLD_SIZE=0"),
            (TORCHRUN.replace("LOCAL_RANK=1", ""), "RANK=5 is set, as torchrun does, but LOCAL_RANK is not"),
            (
                "LOCAL_RANK=3".to_owned(),
                "LOCAL_RANK=3 is set, as torchrun does, but RANK, WORLD_SIZE, LOCAL_WORLD_SIZE is not",
            ),
            (TORCHRUN.replace("29500", "65535"), "MASTER_PORT=65535: needed"),
            (TORCHRUN.replace("29500", "http"), "MASTER_PORT=http: needed"),
            (TORCHRUN.replace("MASTER_PORT=29500", ""), "MASTER_ADDR=node1: MASTER_PORT is not set"),
            (TORCHRUN.replace("MASTER_ADDR=node1", ""), "MASTER_PORT=29500: MASTER_ADDR is not set"),
            (TORCHRUN.replace("node1", "no/de"), "MASTER_ADDR=no/de: needed"),
            (format!("{TORCHRUN} TIDE_COMM_ID=node1"), "TIDE_COMM_ID=node1: needed: host:port"),
            (format!("{TORCHRUN} TIDE_COMM_ID=node1:0"), "TIDE_COMM_ID=node1:0: needed"),
            (format!("{TORCHRUN} TIDE_COMM_ID=:80"), "TIDE_COMM_ID=:80: needed"),
            (format!("{TORCHRUN} TIDE_COMM_ID=::1:80"), "TIDE_COMM_ID=::1:80: needed"),
            (format!("{TORCHRUN} TIDE_COMM_ID=http://a:80"), "TIDE_COMM_ID=http://a:80: needed"),
            (SRUN.replace("SLURM_LOCALID=1", ""), "SLURM_PROCID=5 is set, as srun does, but SLURM_LOCALID is not"),
            (SRUN.replace("SLURM_NTASKS=8", ""), "but SLURM_NTASKS is not"),
            (SRUN.replace("4(x2)", "4(x2"), "SLURM_STEP_TASKS_PER_NODE=4(x2: needed"),
            (SRUN.replace("4(x2)", "4,2"), "but SLURM_NODEID is not"),
            (
                SRUN.replace("4(x2)", "4,2 SLURM_NODEID=2"),
                "SLURM_STEP_TASKS_PER_NODE=4,2: it has no node SLURM_NODEID=2",
            ),
            (SRUN.replace("4(x2)", "0"), "SLURM_STEP_TASKS_PER_NODE=0: needed"),
            (SRUN.replace("4(x2)", "1(x8)"), "SLURM_LOCALID=1 is not below SLURM_STEP_TASKS_PER_NODE=1"),
            (SRUN.replace("node[003-004]", "node[003"), "SLURM_STEP_NODELIST=node[003: needed"),
            (SRUN.replace("JOB_ID=100", "JOB_ID=ten"), "SLURM_JOB_ID=ten: needed"),
            (SRUN.replace("PROCID=5", "PROCID=8"), "SLURM_PROCID=8 is not below SLURM_NTASKS=8"),
            (
                MPIRUN.replace("OMPI_COMM_WORLD_SIZE=8", ""),
                "OMPI_COMM_WORLD_RANK=5 is set, as mpirun does, but OMPI_COMM_WORLD_SIZE",
            ),
            ("PMIX_RANK=5".to_owned(), "mpirun says PMIX_RANK=5, but not how many"),
            ("PMI_RANK=5".to_owned(), "PMI_RANK=5 is set, as mpirun does, but PMI_SIZE is not"),
            ("PMI_RANK=5 PMI_SIZE=8".to_owned(), "mpirun says PMI_RANK=5 PMI_SIZE=8, but not how many"),
            ("PMI_RANK=8 PMI_SIZE=8".to_owned(), "PMI_RANK=8 is not below PMI_SIZE=8"),
            (format!("RANK={long}"), "99…: needed"),
        ] {
            let error = detect(&variables).expect_err(&variables);
            assert!(
                matches!(error, TideError::Usage(_)) && error.to_string().contains(expected),
                "{variables}: {error}"
            );
        }
    }

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, expected) in [
            ("node1", Some("node1")),
            ("node1,node2", Some("node1")),
            ("node[003-010,12]", Some("node003")),
            ("node[12,003]-ib,login", Some("node12-ib")),
            ("rack[0-1]n[0-7]", Some("rack0n0")),
            ("a.b-c_d", Some("a.b-c_d")),
            ("", None),
            (",a", None),
            ("node[", None),
            ("node[]", None),
            ("node[a-b]", None),
            ("no de", None),
            ("node]", None),
        ] {
            assert_eq!(first_host(list).as_deref(), expected, "{list}");
        }
    }

    #[test]
    fn tasks_per_node_are_read_in_slurms_form() {
        assert_eq!(tasks_per_node("X", "8(x2),4").unwrap(), [(8, 2), (4, 1)]);
        for wrong in ["", ",", "8(x)", "(x2)", "8(x0)", "8x2", "-1", "8(x2)(x3)"] {
            assert!(tasks_per_node("X", wrong).is_err(), "{wrong}");
        }
    }
}
