//! What goes over the wire: a handshake of fixed sizes, then frames. Integers are little-endian.
//!
//! ```text
//! member → root   hello      magic 8, version 4, rank 4, rank count 4, nonce 32
//! root → member   challenge  magic 8, version 4, nonce 32
//! member → root   proof      patience in ms 4, HMAC-SHA-256 of the token over ("member", hello, the root's nonce, patience)
//! root → member   frame      welcome, whose body is the same over ("root", hello, the root's nonce), or refused
//! root → member   frame      complete, once all ranks have joined
//! member → root   frame      contribution; goodbye, after which the connection is closed
//! root → member   frame      gathered, or failed, whose body is a sentence
//! ```
//!
//! Magic and version stand in the same place in every version. Everything here is pure; nothing that a peer can send panics.

use std::fmt;

use crate::launch::launcher::RANK_COUNT_MAX;
use crate::launch::token::{NONCE_BYTES, PROOF_BYTES, Token};

/// The most bytes that a rank can give in one call.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// The most bytes that all ranks together can give in one call.
pub const GATHERED_BYTES_MAX: usize = 64 << 20;
/// The most bytes of a label.
pub const LABEL_BYTES_MAX: usize = 256;

/// Version of all that this module describes.
pub(super) const PROTOCOL_VERSION: u32 = 1;
pub(super) const HELLO_BYTES: usize = MAGIC.len() + 12 + NONCE_BYTES;
pub(super) const CHALLENGE_BYTES: usize = MAGIC.len() + 4 + NONCE_BYTES;
/// Magic 4, version 2, kind 2, label bytes 4, body bytes 4, sequence number 8.
pub(super) const HEADER_BYTES: usize = 24;

const MAGIC: [u8; 8] = *b"TIDE-RDV";
const FRAME_MAGIC: [u8; 4] = *b"TIDf";

/// Why bytes are no message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WireError {
    /// Something else speaks.
    Magic,
    /// Another version of this protocol.
    Version(u32),
    /// A frame longer than allowed.
    TooLong { bytes: u64, limit: u64 },
    /// Within the form, and still no message.
    Malformed(&'static str),
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => f.write_str("it does not speak TIDE's protocol"),
            Self::Version(other) => write!(f, "it speaks version {other} of the protocol, not {PROTOCOL_VERSION}"),
            Self::TooLong { bytes, limit } => write!(f, "it announces a message of {bytes} bytes, more than {limit}"),
            Self::Malformed(what) => write!(f, "its message has {what}"),
        }
    }
}

/// A member's first words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    pub rank: u32,
    pub rank_count: u32,
    pub nonce: [u8; NONCE_BYTES],
}

impl Hello {
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        for (place, value) in bytes[8..20].chunks_exact_mut(4).zip([PROTOCOL_VERSION, self.rank, self.rank_count]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        bytes[20..].copy_from_slice(&self.nonce);
        bytes
    }

    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, WireError> {
        check_magic_and_version(bytes)?;
        let mut nonce = [0; NONCE_BYTES];
        nonce.copy_from_slice(&bytes[20..]);
        Ok(Self { rank: u32_at(bytes, 12), rank_count: u32_at(bytes, 16), nonce })
    }
}

/// The root's challenge.
pub(super) fn encode_challenge(nonce: &[u8; NONCE_BYTES]) -> [u8; CHALLENGE_BYTES] {
    let mut bytes = [0; CHALLENGE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    bytes[12..].copy_from_slice(nonce);
    bytes
}

/// The nonce of a challenge.
pub(super) fn decode_challenge(bytes: &[u8; CHALLENGE_BYTES]) -> Result<[u8; NONCE_BYTES], WireError> {
    check_magic_and_version(bytes)?;
    let mut nonce = [0; NONCE_BYTES];
    nonce.copy_from_slice(&bytes[12..]);
    Ok(nonce)
}

/// Whether the first bytes of a handshake can still become one: strangers are turned away at the first wrong byte.
pub(super) fn may_be_handshake(start: &[u8]) -> bool {
    let length = start.len().min(MAGIC.len());
    start[..length] == MAGIC[..length]
}

fn check_magic_and_version(bytes: &[u8]) -> Result<(), WireError> {
    if bytes[..8] != MAGIC {
        return Err(WireError::Magic);
    }
    match u32_at(bytes, 8) {
        PROTOCOL_VERSION => Ok(()),
        other => Err(WireError::Version(other)),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// A handshake so far, which both sides vouch for.
pub(super) struct Transcript {
    pub hello: [u8; HELLO_BYTES],
    /// The root's nonce.
    pub nonce: [u8; NONCE_BYTES],
}

pub(super) const MEMBER_PROOF_BYTES: usize = 4 + PROOF_BYTES;

impl Transcript {
    /// A member's proof. The patience is how long it will wait for all to join. It is in this message, not in the hello, as
    /// the hello may lie unread for a while: the proof answers what the root said just now.
    pub fn prove_member(&self, token: &Token, patience_ms: u32) -> [u8; MEMBER_PROOF_BYTES] {
        let patience = patience_ms.to_le_bytes();
        let mut bytes = [0; MEMBER_PROOF_BYTES];
        bytes[..4].copy_from_slice(&patience);
        bytes[4..].copy_from_slice(&token.prove(&[b"member", &self.hello, &self.nonce, &patience]));
        bytes
    }

    /// The member's patience in ms, if the proof is that of a holder of the token.
    pub fn accept_member(&self, token: &Token, bytes: &[u8; MEMBER_PROOF_BYTES]) -> Option<u32> {
        let (patience, proof) = bytes.split_first_chunk::<4>()?;
        let parts: [&[u8]; 4] = [b"member", &self.hello, &self.nonce, patience];
        token.accepts(&parts, proof.first_chunk()?).then(|| u32::from_le_bytes(*patience))
    }

    /// The root's proof.
    pub fn prove_root(&self, token: &Token) -> [u8; PROOF_BYTES] {
        token.prove(&[b"root", &self.hello, &self.nonce])
    }

    /// Whether the body of a welcome is the proof of a root that holds the token.
    pub fn accepts_root(&self, token: &Token, body: &[u8]) -> bool {
        <&[u8; PROOF_BYTES]>::try_from(body)
            .is_ok_and(|proof| token.accepts(&[b"root", &self.hello, &self.nonce], proof))
    }
}

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Kind {
    Welcome = 1,
    Refused = 2,
    Complete = 3,
    Contribution = 4,
    Gathered = 5,
    Failed = 6,
    Goodbye = 7,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Welcome, Self::Refused, Self::Complete, Self::Contribution, Self::Gathered, Self::Failed, Self::Goodbye];
}

/// One message after the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub kind: Kind,
    /// Number of the call, from 0; 0 where there is none.
    pub sequence: u64,
    pub label: String,
    pub body: Vec<u8>,
}

impl Frame {
    /// A frame of no call.
    pub fn outside_calls(kind: Kind, body: impl Into<Vec<u8>>) -> Self {
        Self { kind, sequence: 0, label: String::new(), body: body.into() }
    }

    pub fn encode(&self) -> Vec<u8> {
        encode_frame(self.kind, self.sequence, &self.label, &self.body)
    }
}

/// The bytes of a frame.
pub(super) fn encode_frame(kind: Kind, sequence: u64, label: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + label.len() + body.len());
    bytes.extend(FRAME_MAGIC);
    bytes.extend((PROTOCOL_VERSION as u16).to_le_bytes());
    bytes.extend((kind as u16).to_le_bytes());
    bytes.extend((label.len() as u32).to_le_bytes());
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(sequence.to_le_bytes());
    bytes.extend(label.as_bytes());
    bytes.extend(body);
    bytes
}

/// Makes frames of bytes as they come.
pub(super) struct FrameReader {
    bytes: Vec<u8>,
    body_bytes_max: usize,
}

impl FrameReader {
    /// Nothing came yet; a frame's body has at most `body_bytes_max` bytes.
    pub fn new(body_bytes_max: usize) -> Self {
        Self { bytes: Vec::new(), body_bytes_max }
    }

    /// More bytes came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether a frame has begun and is not whole.
    pub fn is_within_frame(&self) -> bool {
        !self.bytes.is_empty()
    }

    /// The next frame, if it is whole. A length is checked before anything of that length is held.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, WireError> {
        let Some(header) = self.bytes.first_chunk::<HEADER_BYTES>() else {
            let length = self.bytes.len().min(FRAME_MAGIC.len());
            return if self.bytes[..length] == FRAME_MAGIC[..length] { Ok(None) } else { Err(WireError::Magic) };
        };
        if header[..4] != FRAME_MAGIC {
            return Err(WireError::Magic);
        }
        let version = u32::from(u16::from_le_bytes([header[4], header[5]]));
        if version != PROTOCOL_VERSION {
            return Err(WireError::Version(version));
        }
        let kind = u16::from_le_bytes([header[6], header[7]]);
        let kind = Kind::ALL.into_iter().find(|k| *k as u16 == kind).ok_or(WireError::Malformed("an unknown kind"))?;
        let (label_bytes, body_bytes) = (u32_at(header, 8) as usize, u32_at(header, 12) as usize);
        for (bytes, limit) in [(label_bytes, LABEL_BYTES_MAX), (body_bytes, self.body_bytes_max)] {
            if bytes > limit {
                return Err(WireError::TooLong { bytes: bytes as u64, limit: limit as u64 });
            }
        }
        let mut sequence = [0; 8];
        sequence.copy_from_slice(&header[16..]);
        let end = HEADER_BYTES + label_bytes + body_bytes;
        if self.bytes.len() < end {
            return Ok(None);
        }
        let label = std::str::from_utf8(&self.bytes[HEADER_BYTES..HEADER_BYTES + label_bytes])
            .map_err(|_| WireError::Malformed("a label that is no text"))?
            .to_owned();
        let body = self.bytes[HEADER_BYTES + label_bytes..end].to_vec();
        self.bytes.drain(..end);
        Ok(Some(Frame { kind, sequence: u64::from_le_bytes(sequence), label, body }))
    }
}

/// Bytes of [`encode_gathered`]'s result.
pub(super) fn gathered_bytes(contributions: &[Vec<u8>]) -> usize {
    4 + contributions.iter().map(|c| 4 + c.len()).sum::<usize>()
}

/// What every rank gave, as one body: their number, then the length and the bytes of each.
pub(super) fn encode_gathered(contributions: &[Vec<u8>]) -> Vec<u8> {
    let mut body = Vec::with_capacity(gathered_bytes(contributions));
    body.extend((contributions.len() as u32).to_le_bytes());
    for bytes in contributions {
        body.extend((bytes.len() as u32).to_le_bytes());
        body.extend(bytes);
    }
    body
}

/// What every one of `rank_count` ranks gave.
pub(super) fn decode_gathered(body: &[u8], rank_count: u32) -> Result<Vec<Vec<u8>>, WireError> {
    let malformed = WireError::Malformed("parts that do not fit its length");
    let take = |bytes: &mut &[u8]| -> Option<u32> {
        let (head, rest) = bytes.split_first_chunk()?;
        *bytes = rest;
        Some(u32::from_le_bytes(*head))
    };
    let mut rest = body;
    if take(&mut rest) != Some(rank_count) || rank_count > RANK_COUNT_MAX {
        return Err(WireError::Malformed("another number of ranks"));
    }
    let mut contributions = Vec::new();
    for _ in 0..rank_count {
        let length = take(&mut rest).ok_or(malformed.clone())? as usize;
        let (bytes, after) = rest.split_at_checked(length).ok_or(malformed.clone())?;
        contributions.push(bytes.to_vec());
        rest = after;
    }
    if rest.is_empty() { Ok(contributions) } else { Err(malformed) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Hello {
        Hello { rank: 3, rank_count: 8, nonce: [7; NONCE_BYTES] }
    }

    #[test]
    fn a_handshake_comes_back_as_it_went() {
        assert_eq!(Hello::decode(&hello().encode()), Ok(hello()));
        assert_eq!(decode_challenge(&encode_challenge(&[9; NONCE_BYTES])), Ok([9; NONCE_BYTES]));
    }

    #[test]
    fn another_version_is_named_and_another_protocol_refused() {
        let mut bytes = hello().encode();
        bytes[8] = 2;
        assert_eq!(Hello::decode(&bytes), Err(WireError::Version(2)));
        bytes[0] = b'G';
        assert_eq!(Hello::decode(&bytes), Err(WireError::Magic));
        assert!(may_be_handshake(b"") && may_be_handshake(b"TIDE-") && !may_be_handshake(b"GET / "));
    }

    #[test]
    fn each_side_proves_in_its_own_name() {
        let token = Token::new("secret");
        let transcript = Transcript { hello: hello().encode(), nonce: [1; NONCE_BYTES] };
        let mut proof = transcript.prove_member(&token, 500);
        assert_eq!(transcript.accept_member(&token, &proof), Some(500));
        assert!(!transcript.accepts_root(&token, &proof[4..]));
        assert!(transcript.accepts_root(&token, &transcript.prove_root(&token)));
        let other = Transcript { nonce: [2; NONCE_BYTES], ..transcript };
        assert_eq!(other.accept_member(&token, &proof), None);
        proof[0] ^= 1;
        assert_eq!(transcript.accept_member(&token, &proof), None);
    }

    #[test]
    fn a_length_over_the_limit_is_refused_from_the_header_alone() {
        let mut reader = FrameReader::new(100);
        let frame = Frame::outside_calls(Kind::Contribution, [0; 101]);
        reader.push(&frame.encode()[..HEADER_BYTES]);
        assert_eq!(reader.next_frame(), Err(WireError::TooLong { bytes: 101, limit: 100 }));
    }

    proptest! {
        #[test]
        fn frames_come_back_however_they_are_cut(
            sequence: u64, label in "[a-z é]{0,40}", body: Vec<u8>, cuts in prop::collection::vec(1_usize..50, 1..40),
        ) {
            let frame = Frame { kind: Kind::Gathered, sequence, label, body };
            let bytes = [frame.encode(), frame.encode()].concat();
            let mut reader = FrameReader::new(MESSAGE_BYTES_MAX);
            let (mut rest, mut frames) = (&bytes[..], Vec::new());
            for cut in cuts.iter().cycle() {
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                reader.push(now);
                rest = later;
                while let Some(frame) = reader.next_frame().unwrap() {
                    frames.push(frame);
                }
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(frames, vec![frame.clone(), frame]);
            prop_assert!(!reader.is_within_frame());
        }

        #[test]
        fn garbage_is_refused_and_never_panics(bytes: Vec<u8>, rank_count: u32, version_right: bool) {
            let mut reader = FrameReader::new(1000);
            if version_right {
                reader.push(&FRAME_MAGIC);
                reader.push(&(PROTOCOL_VERSION as u16).to_le_bytes());
            }
            reader.push(&bytes);
            for _ in 0..4 {
                let _ = reader.next_frame();
            }
            let _ = decode_gathered(&bytes, rank_count);
            let mut hello = [0; HELLO_BYTES];
            let length = bytes.len().min(HELLO_BYTES);
            hello[..length].copy_from_slice(&bytes[..length]);
            let _ = Hello::decode(&hello);
        }

        /// One changed byte of a frame gives another frame or an error, never a panic.
        #[test]
        fn a_damaged_frame_never_panics(body: Vec<u8>, at: prop::sample::Index, value: u8) {
            let mut bytes = Frame { kind: Kind::Contribution, sequence: 1, label: "x".into(), body }.encode();
            let at = at.index(bytes.len());
            bytes[at] = value;
            let mut reader = FrameReader::new(1000);
            reader.push(&bytes);
            let _ = reader.next_frame();
        }

        #[test]
        fn what_was_gathered_comes_back(contributions in prop::collection::vec(any::<Vec<u8>>(), 0..9)) {
            let body = encode_gathered(&contributions);
            prop_assert_eq!(body.len(), gathered_bytes(&contributions));
            let rank_count = contributions.len() as u32;
            prop_assert_eq!(decode_gathered(&body, rank_count), Ok(contributions));
            prop_assert!(decode_gathered(&body, rank_count + 1).is_err());
            prop_assert!(decode_gathered(&body[..body.len() - 1], rank_count).is_err());
        }
    }
}
