//! The kernels' PTX, which of it a GPU takes, and whether the driver can read it. All but the embedded text is pure.

use super::driver::Version;
use crate::error::{Result, TideError};
use std::fmt;

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// A GPU's compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Capability {
    /// Before the point.
    pub major: u32,
    /// After it.
    pub minor: u32,
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// PTX that the library was built with.
#[derive(Debug, Clone, Copy)]
pub struct Image {
    /// Its file in the sources.
    pub file: &'static str,
    /// Its text; empty if the file was not there when the library was built.
    pub text: &'static str,
}

impl Image {
    /// Its architecture, as `sm_90`.
    pub fn arch(&self) -> &'static str {
        let name = self.file.rsplit('/').next().unwrap_or(self.file);
        name.strip_suffix(".ptx").unwrap_or(name)
    }
}

/// Best first: what a GPU of which capability, or later, takes.
const IMAGES: [(Capability, Image); 2] = [
    (Capability { major: 10, minor: 0 }, Image { file: "device/ptx/sm_100.ptx", text: SM_100 }),
    (Capability { major: 9, minor: 0 }, Image { file: "device/ptx/sm_90.ptx", text: SM_90 }),
];

/// The embedded PTX for a GPU.
///
/// # Errors
/// [`TideError::Unsupported`] where the GPU is too old, or the library was built without its PTX.
pub fn choose(name: &str, capability: Capability) -> Result<Image> {
    let Some((_, image)) = IMAGES.iter().find(|(needed, _)| capability >= *needed) else {
        return Err(TideError::Unsupported {
            needed: format!("a GPU of compute capability {} or later", IMAGES[IMAGES.len() - 1].0),
            found: format!("{name} of compute capability {capability}"),
        });
    };
    if image.text.is_empty() {
        return Err(TideError::Unsupported {
            needed: format!("the kernels' PTX for compute capability {capability} in this build"),
            found: format!("no {} when it was built: `cargo xtask ptx` makes it", image.file),
        });
    }
    Ok(*image)
}

/// A version of the PTX language.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(pub u32, pub u32);

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Which PTX a driver reads, by its CUDA version: from that version on, up to that ISA.
const ISA_OF_DRIVER: [(i32, Isa); 13] = [
    (11080, Isa(7, 8)),
    (12000, Isa(8, 0)),
    (12010, Isa(8, 1)),
    (12020, Isa(8, 2)),
    (12030, Isa(8, 3)),
    (12040, Isa(8, 4)),
    (12050, Isa(8, 5)),
    (12070, Isa(8, 6)),
    (12080, Isa(8, 7)),
    (12090, Isa(8, 8)),
    (13000, Isa(9, 0)),
    (13010, Isa(9, 1)),
    (13020, Isa(9, 2)),
];

/// The newest PTX that a driver is known to read; `None` for a driver newer than the table, which reads all of it.
fn isa_max(driver: Version) -> Option<Isa> {
    let (newest, _) = ISA_OF_DRIVER[ISA_OF_DRIVER.len() - 1];
    if driver.0 > newest {
        return None;
    }
    let known = ISA_OF_DRIVER.iter().rev().find(|(from, _)| driver.0 >= *from);
    Some(known.map_or(Isa(0, 0), |(_, isa)| *isa))
}

/// What the head of a PTX text asks of driver and GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Head {
    isa: Isa,
    /// `sm_90`, `sm_90a`, …
    target: String,
}

impl Head {
    fn parse(text: &str) -> Option<Self> {
        let directive = |name: &str| {
            let line = text.lines().map(str::trim_start).find_map(|line| line.strip_prefix(name))?;
            line.split([',', ' ', '\t', '/']).find(|word| !word.is_empty())
        };
        let (major, minor) = directive(".version ")?.split_once('.')?;
        let isa = Isa(major.parse().ok()?, minor.parse().ok()?);
        Some(Self { isa, target: directive(".target ")?.to_owned() })
    }

    /// Whether a GPU runs code for this target: later ones too, or with suffix `a` only this one, with `f` its family.
    fn runs_on(&self, capability: Capability) -> bool {
        let Some(name) = self.target.strip_prefix("sm_") else { return false };
        let digits = name.trim_end_matches(|c: char| c.is_ascii_lowercase());
        let Ok(number) = digits.parse::<u32>() else { return false };
        let target = Capability { major: number / 10, minor: number % 10 };
        match &name[digits.len()..] {
            "" => capability >= target,
            "a" => capability == target,
            "f" => capability.major == target.major && capability.minor >= target.minor,
            _ => false,
        }
    }
}

/// Whether a driver and a GPU take a PTX text, before it is handed to the driver.
///
/// # Errors
/// [`TideError::Unsupported`] that says what is needed and what is there.
pub fn guard(file: &str, text: &str, driver: Version, capability: Capability) -> Result<()> {
    let Some(head) = Head::parse(text) else {
        return Err(TideError::Unsupported {
            needed: format!("PTX with .version and .target in {file}"),
            found: "a text without them".to_owned(),
        });
    };
    if !head.runs_on(capability) {
        return Err(TideError::Unsupported {
            needed: format!("a GPU that runs PTX for {} ({file})", head.target),
            found: format!("a GPU of compute capability {capability}"),
        });
    }
    if let Some(most) = isa_max(driver)
        && head.isa > most
    {
        return Err(TideError::Unsupported {
            needed: format!("a driver that reads PTX ISA {} ({file})", head.isa),
            found: format!("a driver of CUDA {driver}, which reads PTX ISA up to {most}"),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: Capability = Capability { major: 9, minor: 0 };
    const BLACKWELL: Capability = Capability { major: 10, minor: 0 };

    fn text(isa: &str, target: &str) -> String {
        format!("// header\n//\n\n.version {isa}\n.target {target}\n.address_size 64\n")
    }

    fn refusal(isa: &str, target: &str, driver: i32, capability: Capability) -> String {
        match guard("k.ptx", &text(isa, target), Version(driver), capability) {
            Err(error @ TideError::Unsupported { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_image_is_named_for_its_architecture() {
        assert_eq!(IMAGES.map(|(_, image)| image.arch()), ["sm_100", "sm_90"]);
    }

    #[test]
    fn a_driver_reads_ptx_up_to_its_own_release() {
        for (isa, driver) in [("8.6", 13000), ("9.0", 13000), ("8.6", 12080), ("8.7", 12080), ("9.9", 14000)] {
            guard("k.ptx", &text(isa, "sm_90"), Version(driver), HOPPER).unwrap();
        }
        let refused = refusal("9.0", "sm_90", 12040, HOPPER);
        assert!(refused.contains("PTX ISA 9.0") && refused.contains("CUDA 12.4") && refused.contains("up to 8.4"));
        assert!(refusal("9.1", "sm_90", 13000, HOPPER).contains("up to 9.0"));
        assert!(refusal("8.6", "sm_90", 12060, HOPPER).contains("up to 8.5"));
    }

    #[test]
    fn a_gpu_runs_ptx_for_its_target_and_earlier_ones() {
        guard("k.ptx", &text("8.6", "sm_90"), Version(13000), BLACKWELL).unwrap();
        guard("k.ptx", &text("8.6", "sm_90a"), Version(13000), HOPPER).unwrap();
        guard("k.ptx", &text("8.8", "sm_100f"), Version(13000), Capability { major: 10, minor: 3 }).unwrap();
        assert!(refusal("8.6", "sm_100", 13000, HOPPER).contains("sm_100"));
        assert!(refusal("8.6", "sm_90a", 13000, BLACKWELL).contains("10.0"));
        assert!(refusal("8.6", "sm_90", 13000, Capability { major: 8, minor: 0 }).contains("8.0"));
        assert!(refusal("8.8", "sm_100f", 13000, Capability { major: 12, minor: 0 }).contains("12.0"));
    }

    #[test]
    fn a_text_that_is_not_ptx_is_refused() {
        assert!(guard("k.ptx", "", Version(13000), HOPPER).is_err());
        assert!(guard("k.ptx", ".version x\n.target sm_90", Version(13000), HOPPER).is_err());
    }

    #[test]
    fn an_old_gpu_is_refused_by_name() {
        let old = choose("NVIDIA A100", Capability { major: 8, minor: 0 }).unwrap_err().to_string();
        assert!(old.contains("9.0 or later") && old.contains("NVIDIA A100 of compute capability 8.0"), "{old}");
    }

    #[test]
    fn embedded_ptx_passes_the_guard_for_its_gpus() {
        for (capability, image) in IMAGES {
            match choose("a GPU", capability) {
                Ok(chosen) => {
                    assert_eq!(chosen.file, image.file);
                    guard(image.file, image.text, Version(13000), capability).unwrap();
                }
                Err(error) => assert!(image.text.is_empty() && error.to_string().contains(image.file), "{error}"),
            }
        }
    }
}
