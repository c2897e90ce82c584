//! Whether this machine has the memory that a run will take, asked before it takes any.

use anyhow::Result;

use crate::failure::unsupported;

/// What a run takes beside the data: stacks, tables, the check's scratch.
const OVERHEAD_BYTES: u64 = 64 << 20;

/// Refuses a run that would take more memory than the machine has.
///
/// # Errors
/// The sentence says how much is needed and how much is there.
pub fn check(needed_bytes: u64, preset: Option<&str>) -> Result<()> {
    let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_bytes(&text));
    match available {
        Some(available) => compare(needed_bytes.saturating_add(OVERHEAD_BYTES), available, preset),
        None => Ok(()),
    }
}

fn compare(needed: u64, available: u64, preset: Option<&str>) -> Result<()> {
    if needed <= available {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let advice = match preset {
        Some(name) if !name.ends_with("-tiny") => format!("; try --preset {name}-tiny"),
        _ => "; try fewer ranks or a smaller group".to_owned(),
    };
    Err(unsupported(format!("the run needs {:.1} GiB, the machine has {:.1} GiB{advice}", gib(needed), gib(available))))
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available_bytes(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::{UNSUPPORTED, exit_status};

    #[test]
    fn available_memory_is_read_in_bytes() {
        assert_eq!(available_bytes("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), Some(2 << 20));
        assert_eq!(available_bytes("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn too_large_a_run_is_unsupported_and_says_what_fits() {
        let error = compare(3 << 30, 2 << 30, Some("llama-3.1-70b")).unwrap_err();
        assert_eq!(exit_status(&error), UNSUPPORTED);
        let expected = "the run needs 3.0 GiB, the machine has 2.0 GiB; try --preset llama-3.1-70b-tiny";
        assert_eq!(error.to_string(), expected);
        assert!(compare(2 << 30, 2 << 30, None).is_ok());
        assert!(check(u64::MAX, None).is_err());
    }
}
