//! The secret that the processes of a job share, and how one shows that it holds it without sending it.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;

use super::launcher::Environment;
use crate::error::{Result, TideError};

/// Bytes of a proof: an HMAC-SHA-256.
pub(crate) const PROOF_BYTES: usize = 32;
/// Bytes of a challenge.
pub(crate) const NONCE_BYTES: usize = 32;

/// What all processes of a job know and others do not. It is never sent, and not shown by `Debug`.
///
/// It keeps strangers and the processes of other jobs out of a rendezvous. It is no encryption: what ranks exchange can be
/// read and changed by whoever controls the network between them.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Vec<u8>);

impl Token {
    /// A token of these bytes. An empty one keeps nobody out.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// A fresh one: 128 random bits, in hexadecimal digits.
    ///
    /// # Errors
    /// [`TideError::Launch`] if the operating system has no random numbers.
    pub fn random() -> Result<Self> {
        let bytes = random::<16>()?;
        Ok(Self(bytes.iter().flat_map(|b| format!("{b:02x}").into_bytes()).collect()))
    }

    /// `TIDE_TOKEN`; without it, the number of the launcher's job, which keeps jobs apart but is no secret; else empty.
    ///
    /// The number is `TORCHELASTIC_RUN_ID`, `SLURM_JOB_ID` or `PMIX_NAMESPACE`, whichever is set first in this order.
    pub fn from_env(env: Environment) -> Self {
        if let Some(token) = env("TIDE_TOKEN").filter(|t| !t.is_empty()) {
            return Self(token.into_bytes());
        }
        let job = ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE"];
        let found = job.iter().find_map(|name| env(name).filter(|v| !v.is_empty()).map(|v| format!("{name}={v}")));
        Self(found.unwrap_or_default().into_bytes())
    }

    /// The bytes, as they go into a child's environment.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// What only a holder of the token can say about `parts`. Each part counts with its length, so that no two lists of parts
    /// are the same bytes.
    pub(crate) fn prove(&self, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Whether `proof` was made by a holder of the token for `parts`; in constant time.
    pub(crate) fn accepts(&self, parts: &[&[u8]], proof: &[u8; PROOF_BYTES]) -> bool {
        self.mac(parts).verify_slice(proof).is_ok()
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "Token(empty)" } else { "Token(hidden)" })
    }
}

/// Random bytes of the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    match getrandom::fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) => Err(TideError::Launch { detail: format!("no random numbers: {error}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_token_and_its_parts_alone() {
        let token = Token::new("secret");
        let proof = token.prove(&[b"ab", b"c"]);
        assert!(token.accepts(&[b"ab", b"c"], &proof));
        assert!(!token.accepts(&[b"a", b"bc"], &proof));
        assert!(!Token::new("Secret").accepts(&[b"ab", b"c"], &proof));
        assert!(!token.accepts(&[b"ab", b"c"], &[0; PROOF_BYTES]));
    }

    #[test]
    fn a_token_is_not_shown_and_two_random_ones_differ() {
        assert_eq!(format!("{:?}", Token::new("secret")), "Token(hidden)");
        let (a, b) = (Token::random().unwrap(), Token::random().unwrap());
        assert!(a != b && a.as_bytes().len() == 32);
    }

    #[test]
    fn the_variable_goes_before_the_job_number() {
        let env = |set: &'static [(&str, &str)]| {
            move |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        };
        let token = |set| Token::from_env(&env(set));
        assert_eq!(token(&[("TIDE_TOKEN", "x"), ("SLURM_JOB_ID", "7")]), Token::new("x"));
        assert_eq!(token(&[("TIDE_TOKEN", ""), ("SLURM_JOB_ID", "7")]), Token::new("SLURM_JOB_ID=7"));
        assert_eq!(token(&[]), Token::new(""));
    }
}
