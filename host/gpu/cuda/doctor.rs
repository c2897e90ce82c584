//! What this machine has of what TIDE uses, and what each lack costs: one line a check.
//!
//! [`report`] asks the driver and the environment and allocates nothing on a GPU; [`judge`] is pure.

use super::driver::{Absence, Driver, Version};
use super::ptx::{self, Capability};
use crate::error::Result;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use nccl_gin::host as nccl;
use std::fmt;

/// Dynamic shared memory per block that the sum kernels are tuned for, bytes.
pub const SHARED_BYTES_NEEDED: u32 = 207_000;

/// Hardware queues that the driver gives a process which does not ask.
const CONNECTIONS_DEFAULT: u32 = 8;

/// Hardware queues of the paper's runs.
const CONNECTIONS_PAPER: u32 = 32;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// As it should be.
    Pass,
    /// It works, at a cost.
    Warn,
    /// Something does not work.
    Fail,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pass => "pass",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        })
    }
}

/// One line of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What was looked at.
    pub name: String,
    /// How it came out.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What the lack costs; empty for a pass.
    pub cost: String,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:4}  {:30}  {}", self.verdict, self.name, self.found)?;
        if self.cost.is_empty() { Ok(()) } else { write!(f, ": {}", self.cost) }
    }
}

/// All checks, in the order in which they build on each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoctorReport {
    /// The lines.
    pub checks: Vec<Check>,
}

impl DoctorReport {
    /// The worst verdict.
    pub fn verdict(&self) -> Verdict {
        self.checks.iter().map(|c| c.verdict).max().unwrap_or(Verdict::Pass)
    }
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.checks.iter().try_for_each(|check| writeln!(f, "{check}"))
    }
}

/// A GPU, as far as the checks look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its name.
    pub name: String,
    /// Its compute capability.
    pub capability: Capability,
    /// Its memory, bytes.
    pub memory_bytes: u64,
    /// Its multiprocessors.
    pub multiprocessor_count: u32,
    /// Most dynamic shared memory of a block, bytes.
    pub shared_bytes_max: u32,
    /// Its copy engines.
    pub copy_engine_count: u32,
    /// Whether streams can wait for and write 64-bit words.
    pub stream_memory_operations: bool,
    /// Whether its memory can be bound behind a multicast address.
    pub multicast: bool,
    /// For each GPU, whether its memory can be reached from here; true for itself.
    pub peers: Vec<bool>,
}

/// An NCCL library, as far as the checks look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NcclFacts {
    /// The file.
    pub place: String,
    /// The version that it states.
    pub version: nccl::Version,
    /// What it lacks, and why.
    pub lacks: Vec<(nccl::Ability, nccl::NcclError)>,
}

/// What [`judge`] goes by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The driver and the GPUs, or why there are none.
    pub gpus: Result<(Version, Vec<DeviceFacts>), String>,
    /// The NCCL library that is used, or why none can be.
    pub nccl: Result<NcclFacts, String>,
    /// What in the environment harms NCCL.
    pub hazards: Vec<nccl::Hazard>,
    /// The environment's `CUDA_DEVICE_MAX_CONNECTIONS`.
    pub connections: Option<String>,
}

/// Looks at this machine.
pub fn report() -> DoctorReport {
    let gpus = match Driver::load() {
        Ok(driver) => look(driver).map_err(|error| error.to_string()).and_then(|(version, devices)| {
            if devices.is_empty() { Err(Absence::NoDevice.to_string()) } else { Ok((version, devices)) }
        }),
        Err(absence) => Err(absence.to_string()),
    };
    let connections = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
    let nccl = nccl::Library::load().map(|library| NcclFacts {
        place: library.path().display().to_string(),
        version: library.version(),
        lacks: library.lacks(),
    });
    let nccl = nccl.map_err(|error| error.to_string());
    judge(&Facts { gpus, nccl, hazards: nccl::hazards(), connections })
}

fn look(driver: Driver) -> Result<(Version, Vec<DeviceFacts>)> {
    let handles = (0..driver.device_count()?).map(|d| driver.device(d)).collect::<Result<Vec<_>>>()?;
    let facts = |index: usize| -> Result<DeviceFacts> {
        let (handle, name) = &handles[index];
        let attribute = |a| driver.attribute(*handle, a).map(|v| v.max(0) as u32);
        let mut memory_bytes = 0;
        // SAFETY: `memory_bytes` outlives the call.
        unsafe { driver.cuDeviceTotalMem_v2(&mut memory_bytes, *handle) }.ok()?;
        let reaches = |(other, (peer, _)): (usize, &(_, String))| {
            if other == index { Ok(true) } else { driver.can_access(*handle, *peer) }
        };
        Ok(DeviceFacts {
            name: name.clone(),
            capability: Capability {
                major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            },
            memory_bytes: memory_bytes as u64,
            multiprocessor_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_max: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            copy_engine_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
            stream_memory_operations: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)? != 0,
            multicast: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)? != 0,
            peers: handles.iter().enumerate().map(reaches).collect::<Result<_>>()?,
        })
    };
    Ok((driver.version()?, (0..handles.len()).map(facts).collect::<Result<_>>()?))
}

/// The report that facts amount to.
pub fn judge(facts: &Facts) -> DoctorReport {
    let mut checks = Vec::new();
    match &facts.gpus {
        Ok((version, devices)) => {
            checks.push(check("driver", Verdict::Pass, format!("CUDA {version}"), ""));
            checks.push(check("GPUs", Verdict::Pass, devices.len().to_string(), ""));
            for (index, device) in devices.iter().enumerate() {
                judge_device(&mut checks, index, device, *version);
            }
            judge_peers(&mut checks, devices);
        }
        Err(reason) => checks.push(check(
            "driver and GPUs",
            Verdict::Fail,
            reason.clone(),
            "no CUDA back end; `--backend sim` runs everything on the simulated GPUs, and measures nothing",
        )),
    }
    checks.push(judge_nccl(&facts.nccl));
    checks.extend(facts.hazards.iter().filter(|h| h.variable != CONNECTIONS).map(judge_hazard));
    checks.push(judge_connections(facts.connections.as_deref()));
    DoctorReport { checks }
}

fn check(name: impl Into<String>, verdict: Verdict, found: impl Into<String>, cost: impl Into<String>) -> Check {
    Check { name: name.into(), verdict, found: found.into(), cost: cost.into() }
}

fn judge_device(checks: &mut Vec<Check>, index: usize, device: &DeviceFacts, driver: Version) {
    let mut line = |what: &str, verdict, found: String, cost: String| {
        checks.push(check(format!("GPU {index} {what}"), verdict, found, cost));
    };
    let pass_or = |holds: bool, otherwise: Verdict, cost: &str| {
        if holds { (Verdict::Pass, String::new()) } else { (otherwise, cost.to_owned()) }
    };
    let gib = device.memory_bytes as f64 / f64::from(1 << 30);
    let about = format!("{}, {gib:.0} GiB, {} multiprocessors", device.name, device.multiprocessor_count);
    line("name", Verdict::Pass, about, String::new());
    let image = ptx::choose(&device.name, device.capability)
        .and_then(|image| ptx::guard(image.file, image.text, driver, device.capability).map(|()| image));
    match image {
        Ok(image) => {
            let found = format!("{}, runs {}", device.capability, image.file);
            line("compute capability", Verdict::Pass, found, String::new());
        }
        Err(error) => {
            let cost = format!("no kernel runs on it ({error})");
            line("compute capability", Verdict::Fail, device.capability.to_string(), cost);
        }
    }
    let (verdict, cost) = pass_or(
        device.shared_bytes_max >= SHARED_BYTES_NEEDED,
        Verdict::Warn,
        "below 207 KB sums keep fewer loads in flight and are slower",
    );
    line("shared memory per block", verdict, format!("{} bytes", device.shared_bytes_max), cost);
    let (verdict, cost) = pass_or(
        device.copy_engine_count >= 2,
        Verdict::Warn,
        "pushes and scatters of all streams share an engine, or take multiprocessors",
    );
    line("copy engines", verdict, device.copy_engine_count.to_string(), cost);
    let (verdict, cost) =
        pass_or(device.stream_memory_operations, Verdict::Fail, "streams cannot wait for signals: no CUDA back end");
    line("64-bit stream memory ops", verdict, yes(device.stream_memory_operations), cost);
    let (verdict, cost) = pass_or(
        device.multicast,
        Verdict::Warn,
        "landings read every local inbox instead of one multicast address; results are the same",
    );
    line("multicast", verdict, yes(device.multicast), cost);
}

fn yes(holds: bool) -> String {
    if holds { "yes" } else { "no" }.to_owned()
}

fn judge_peers(checks: &mut Vec<Check>, devices: &[DeviceFacts]) {
    let mut lacking = Vec::new();
    for (from, device) in devices.iter().enumerate() {
        lacking
            .extend(device.peers.iter().enumerate().filter(|(_, can)| !**can).map(|(to, _)| format!("{from}->{to}")));
    }
    let pairs = devices.len() * devices.len().saturating_sub(1);
    checks.push(match (pairs, lacking.is_empty()) {
        (0, _) => check("peer access", Verdict::Pass, "one GPU, which carries all ranks", ""),
        (_, true) => check("peer access", Verdict::Pass, format!("all {pairs} pairs"), ""),
        _ => check(
            "peer access",
            Verdict::Fail,
            format!("none for {} of {pairs} pairs: {}", lacking.len(), lacking.join(" ")),
            "these GPUs cannot carry ranks of one node together; choose devices that reach each other",
        ),
    });
}

fn judge_nccl(nccl: &Result<NcclFacts, String>) -> Check {
    let nccl = match nccl {
        Ok(nccl) => nccl,
        Err(reason) => {
            let cost = format!("no rails between hosts, one process carries all ranks ({reason})");
            return check("NCCL", Verdict::Warn, "none", cost);
        }
    };
    let found = format!("{} ({})", nccl.version, nccl.place);
    let costs: Vec<String> = nccl
        .lacks
        .iter()
        .filter_map(|(ability, reason)| Some(format!("{}: {}", loss(*ability)?, why(reason))))
        .collect();
    let verdict = if costs.is_empty() { Verdict::Pass } else { Verdict::Warn };
    check("NCCL", verdict, found, costs.join("; "))
}

/// What does not work without an ability; `None` if others of the list say so too.
fn loss(ability: nccl::Ability) -> Option<&'static str> {
    match ability {
        nccl::Ability::Windows => Some("no symmetric memory"),
        nccl::Ability::HostRma => Some("no rails between hosts by host RMA"),
        nccl::Ability::DeviceComm => Some("no device path"),
        nccl::Ability::Collectives | nccl::Ability::Pointers | nccl::Ability::Properties => None,
    }
}

/// A reason without the file, which the line has already.
fn why(reason: &nccl::NcclError) -> String {
    match reason {
        nccl::NcclError::TooOld { needed, .. } => format!("{needed} or later is needed"),
        nccl::NcclError::MissingSymbol { symbol, .. } => format!("it lacks {symbol}"),
        other => other.to_string(),
    }
}

fn judge_hazard(hazard: &nccl::Hazard) -> Check {
    check(hazard.variable, Verdict::Warn, &*hazard.value, hazard.why)
}

/// The variable that a check of its own looks at.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

fn judge_connections(variable: Option<&str>) -> Check {
    let shared = "streams share hardware queues, so that a wait in one holds up others";
    match variable.map(|v| (v, v.trim().parse::<u32>())) {
        None => check(
            CONNECTIONS,
            Verdict::Pass,
            format!("not set ({CONNECTIONS_DEFAULT}); {CONNECTIONS_PAPER} is best"),
            "",
        ),
        Some((_, Ok(count))) if (1..CONNECTIONS_DEFAULT).contains(&count) => {
            check(CONNECTIONS, Verdict::Warn, count.to_string(), format!("{shared}; set it to {CONNECTIONS_PAPER}"))
        }
        Some((_, Ok(count))) if (1..=CONNECTIONS_PAPER).contains(&count) => {
            check(CONNECTIONS, Verdict::Pass, count.to_string(), "")
        }
        Some((text, _)) => {
            let cost = format!("not a number from 1 to {CONNECTIONS_PAPER}, so the driver takes its own");
            check(CONNECTIONS, Verdict::Warn, format!("`{text}`"), cost)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn h200() -> DeviceFacts {
        DeviceFacts {
            name: "NVIDIA H200".to_owned(),
            capability: Capability { major: 9, minor: 0 },
            memory_bytes: 139 << 30,
            multiprocessor_count: 132,
            shared_bytes_max: 232_448,
            copy_engine_count: 3,
            stream_memory_operations: true,
            multicast: true,
            peers: vec![true],
        }
    }

    fn facts(devices: Vec<DeviceFacts>) -> Facts {
        let nccl = NcclFacts { place: "libnccl.so.2".to_owned(), version: nccl::Version(23203), lacks: Vec::new() };
        let (gpus, connections) = (Ok((Version(13000), devices)), Some("32".to_owned()));
        Facts { gpus, nccl: Ok(nccl), hazards: Vec::new(), connections }
    }

    fn line<'a>(report: &'a DoctorReport, name: &str) -> &'a Check {
        report.checks.iter().find(|c| c.name.contains(name)).unwrap()
    }

    #[test]
    fn a_good_machine_passes_line_by_line() {
        let report = judge(&facts(vec![h200()]));
        for check in report.checks.iter().filter(|c| !c.name.contains("compute capability")) {
            assert_eq!(check.verdict, Verdict::Pass, "{check}");
        }
        assert_eq!(report.to_string().lines().count(), report.checks.len());
    }

    #[test]
    fn each_lack_says_what_it_costs() {
        let mut poor = h200();
        poor.shared_bytes_max = 99 << 10;
        poor.copy_engine_count = 1;
        poor.multicast = false;
        poor.stream_memory_operations = false;
        poor.capability = Capability { major: 8, minor: 0 };
        let report = judge(&facts(vec![poor]));
        for (name, verdict, cost) in [
            ("shared memory", Verdict::Warn, "slower"),
            ("copy engines", Verdict::Warn, "share an engine"),
            ("multicast", Verdict::Warn, "same"),
            ("stream memory ops", Verdict::Fail, "no CUDA back end"),
            ("compute capability", Verdict::Fail, "9.0 or later"),
        ] {
            let check = line(&report, name);
            assert!(check.verdict == verdict && check.cost.contains(cost), "{check}");
        }
        assert_eq!(report.verdict(), Verdict::Fail);
    }

    #[test]
    fn gpus_that_do_not_reach_each_other_are_named() {
        let mut devices = vec![h200(), h200()];
        devices[0].peers = vec![true, true];
        devices[1].peers = vec![false, true];
        let report = judge(&facts(devices));
        assert!(line(&report, "peer access").found.contains("1->0"));
    }

    #[test]
    fn an_old_nccl_says_what_it_lacks() {
        let mut facts = facts(vec![h200()]);
        let (path, found) = ("/x/libnccl.so.2", nccl::Version(23102));
        let lack = |ability: nccl::Ability| {
            let (needed, what) = (ability.floor(), ability.name());
            (ability, nccl::NcclError::TooOld { path: path.to_owned(), found, needed, what })
        };
        let lacks = vec![lack(nccl::Ability::Pointers), lack(nccl::Ability::DeviceComm)];
        facts.nccl = Ok(NcclFacts { place: path.to_owned(), version: found, lacks });
        let report = judge(&facts);
        let check = line(&report, "NCCL");
        assert!(check.verdict == Verdict::Warn && check.found == "2.31.2 (/x/libnccl.so.2)", "{check}");
        assert_eq!(check.cost, "no device path: 2.32.3 or later is needed");
    }

    #[test]
    fn harmful_variables_get_a_line_each() {
        let mut facts = facts(vec![h200()]);
        let set = |name: &str| ["NCCL_WIN_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"].contains(&name);
        facts.hazards =
            nccl::hazards_among(|name| set(name).then(|| if name.starts_with('C') { "1" } else { "0" }.to_owned()));
        let report = judge(&facts);
        assert_eq!(line(&report, "NCCL_WIN_ENABLE").verdict, Verdict::Warn);
        assert_eq!(report.checks.iter().filter(|c| c.name == CONNECTIONS).count(), 1);
    }

    #[test]
    fn few_hardware_queues_are_warned_of() {
        for (value, verdict) in [
            (None, Verdict::Pass),
            (Some("1"), Verdict::Warn),
            (Some("7"), Verdict::Warn),
            (Some("8"), Verdict::Pass),
            (Some("many"), Verdict::Warn),
        ] {
            assert_eq!(judge_connections(value).verdict, verdict, "{value:?}");
        }
    }

    #[test]
    fn a_machine_without_gpus_gets_a_report_too() {
        let facts = Facts {
            gpus: Err(Absence::NoLibrary.to_string()),
            nccl: Err("none is here".to_owned()),
            hazards: Vec::new(),
            connections: None,
        };
        let report = judge(&facts);
        assert!(line(&report, "driver").cost.contains("--backend sim"), "{report}");
        assert!(line(&report, "NCCL").cost.contains("none is here"), "{report}");
        assert!(super::report().checks.len() >= 3);
    }
}
