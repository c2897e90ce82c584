//! What in the environment is known to harm.

/// A variable that is known to harm. NCCL reads variables from `/etc/nccl.conf` and `~/.nccl.conf` too, where this crate does not look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hazard {
    /// Its name.
    pub variable: &'static str,
    /// Its value.
    pub value: String,
    /// What it does.
    pub why: &'static str,
    /// Whether it makes symmetric windows impossible.
    pub forbids_windows: bool,
}

/// A hazardous setting: variable, values that harm, what they do, whether they forbid windows.
type Rule = (&'static str, fn(&str) -> bool, &'static str, bool);

const RULES: &[Rule] = &[
    (
        "NCCL_COMM_SPLIT_SHARE_RESOURCES",
        nonzero,
        "a split communicator would use its parent's network state, with the parent's rank numbers; this crate sets splitShare=0",
        false,
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        |v| v.trim() == "1",
        "streams share one hardware queue: host RMA and kernels run one after the other, and waits may block what they wait for",
        false,
    ),
    ("NCCL_WIN_ENABLE", zero, "there are no windows", true),
    ("NCCL_CUMEM_ENABLE", zero, "memory is not allocated so that it can be registered", true),
    ("NCCL_P2P_DISABLE", nonzero, "GPUs of a node do not reach each other, so that there is no symmetric memory", true),
    ("NCCL_RMA_DISABLE", nonzero, "there is no host RMA", false),
    ("NCCL_NUM_RMA_CTX", zero, "there is no host RMA", false),
    ("NCCL_CROSS_NIC", zero, "GIN connects rails only, and there is no host RMA between nodes", false),
    ("NCCL_GIN_ENABLE", zero, "there is no GIN", false),
    (
        "NCCL_DEV_API_JIT",
        nonzero,
        "device communicators get the library's own layout, not the one that kernels were built for",
        false,
    ),
    ("NCCL_ENABLE_VERSION_CHECK", zero, "device code of another version is not refused", false),
];

fn zero(value: &str) -> bool {
    value.trim().parse() == Ok(0)
}

fn nonzero(value: &str) -> bool {
    value.trim().parse::<i64>().is_ok_and(|v| v != 0)
}

/// The hazards in this process's environment.
pub fn hazards() -> Vec<Hazard> {
    hazards_among(|name| std::env::var(name).ok())
}

/// The hazards in an environment that `lookup` stands for.
pub fn hazards_among(lookup: impl Fn(&str) -> Option<String>) -> Vec<Hazard> {
    let harmful = |(variable, harms, why, forbids_windows): &Rule| {
        let value = lookup(variable).filter(|value| harms(value))?;
        Some(Hazard { variable, value, why, forbids_windows: *forbids_windows })
    };
    RULES.iter().filter_map(harmful).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_harmful_value_is_named_and_harmless_ones_are_not() {
        for (name, harmful, harmless) in [
            ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1", "0"),
            ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "32"),
            ("NCCL_WIN_ENABLE", "0", "1"),
            ("NCCL_CUMEM_ENABLE", " 0 ", "-2"),
            ("NCCL_RMA_DISABLE", "1", "0"),
            ("NCCL_DEV_API_JIT", "1", ""),
        ] {
            let among = |value: &str| hazards_among(|n| (n == name).then(|| value.to_owned()));
            assert_eq!(among(harmful).iter().map(|h| h.variable).collect::<Vec<_>>(), [name]);
            assert_eq!(among(harmless), [], "{name}={harmless}");
        }
        assert_eq!(hazards_among(|_| None), []);
    }

    #[test]
    fn what_forbids_windows_says_so() {
        let all = hazards_among(|name| Some(if name.ends_with("_ENABLE") { "0" } else { "1" }.to_owned()));
        let forbidding: Vec<_> = all.iter().filter(|h| h.forbids_windows).map(|h| h.variable).collect();
        assert_eq!(forbidding, ["NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_P2P_DISABLE"]);
    }
}
