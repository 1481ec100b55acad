use sha2::{Digest, Sha256};

use crate::trace::TraceError;

const MAGIC: &[u8; 8] = b"ELDRTRAC";
const VERSION: u32 = 1;
/// Bytes of magic and version.
pub const PREAMBLE: usize = 12;
/// Bytes before a frame's content.
pub const FRAME_HEAD: usize = 16;

/// The bytes a trace file starts with.
pub fn preamble() -> [u8; PREAMBLE] {
    let mut bytes = [0; PREAMBLE];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// Whether a file that starts with `bytes`, or is no longer than them, is a trace that this crate can read.
pub fn check_preamble(bytes: &[u8]) -> Result<(), TraceError> {
    match bytes.split_at_checked(MAGIC.len()) {
        _ if bytes.is_empty() => Err(TraceError::Empty),
        Some((magic, rest)) if magic == MAGIC => match rest.first_chunk() {
            Some(&version) => match u32::from_le_bytes(version) {
                VERSION => Ok(()),
                found => Err(TraceError::Version { found, known: VERSION }),
            },
            None => Err(TraceError::Torn { record: 0, at: 0 }),
        },
        _ if is_torn_preamble(bytes) => Err(TraceError::Torn { record: 0, at: 0 }),
        _ => Err(TraceError::NotATrace),
    }
}

/// Whether `bytes`, a whole file, can be what is left of a trace whose first bytes were being written.
pub fn is_torn_preamble(bytes: &[u8]) -> bool {
    bytes.len() < PREAMBLE && preamble().starts_with(bytes)
}

/// The frame of record `number`.
pub fn frame(number: u32, content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len()).expect("a record is below 4 GiB");
    let mut bytes = Vec::with_capacity(FRAME_HEAD + content.len());
    bytes.extend(length.to_le_bytes());
    bytes.extend(length_check(number, length));
    bytes.extend(content_check(number, content));
    bytes.extend(content);
    bytes
}

/// The head of a frame whose length can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHead {
    number: u32,
    length: u32,
    check: [u8; 8],
}

impl FrameHead {
    /// Reads the head of record `number`.
    ///
    /// The length has a checksum of its own: without it, a damaged length in the middle of a file would look like the
    /// file's end.
    pub fn parse(number: u32, bytes: &[u8; FRAME_HEAD]) -> Result<Self, TraceError> {
        let (length, rest) = bytes.split_first_chunk().expect("16 bytes");
        let (length_is, rest) = rest.split_first_chunk().expect("12 bytes");
        let check = *rest.first_chunk().expect("8 bytes");
        let length = u32::from_le_bytes(*length);
        if length_check(number, length) != *length_is {
            return Err(TraceError::Damaged { record: number });
        }
        Ok(Self { number, length, check })
    }

    /// Bytes of the content.
    pub fn length(&self) -> u32 {
        self.length
    }

    /// Whether `content` is what was written.
    pub fn verify(&self, content: &[u8]) -> Result<(), TraceError> {
        let is_same = content.len() == self.length as usize && content_check(self.number, content) == self.check;
        if is_same { Ok(()) } else { Err(TraceError::Damaged { record: self.number }) }
    }
}

fn length_check(number: u32, length: u32) -> [u8; 4] {
    first(Sha256::new().chain_update(number.to_le_bytes()).chain_update(length.to_le_bytes()))
}

fn content_check(number: u32, content: &[u8]) -> [u8; 8] {
    first(Sha256::new().chain_update(number.to_le_bytes()).chain_update(content))
}

/// The first N bytes of a hash.
pub(super) fn first<const N: usize>(hash: Sha256) -> [u8; N] {
    *hash.finalize().first_chunk().expect("32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_of_a_frame_is_seen_and_its_record_named() {
        let whole = frame(3, b"content");
        for bit in 0..whole.len() * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let (head, content) = bytes.split_first_chunk().expect("a head");
            let verified = FrameHead::parse(3, head).and_then(|head| head.verify(content));
            assert_eq!(verified, Err(TraceError::Damaged { record: 3 }), "bit {bit}");
        }
        let (head, content) = whole.split_first_chunk().expect("a head");
        assert_eq!(FrameHead::parse(3, head).and_then(|head| head.verify(content)), Ok(()));
        assert!(FrameHead::parse(2, head).is_err(), "a record at another's place");
    }

    #[test]
    fn a_preamble_is_a_trace_of_this_version_or_says_what_it_is() {
        let good = preamble();
        assert_eq!(check_preamble(&good), Ok(()));
        assert_eq!(check_preamble(b""), Err(TraceError::Empty));
        for n in 1..PREAMBLE {
            assert_eq!(check_preamble(&good[..n]), Err(TraceError::Torn { record: 0, at: 0 }), "{n} bytes");
        }
        for other in [&b"GGUF"[..], b"ELDRTRAX\x01\0\0\0", b"{\"id\":\"a\",\"prompt\":\"x\"}"] {
            assert_eq!(check_preamble(other), Err(TraceError::NotATrace));
        }
        let mut newer = good;
        newer[8] = 9;
        assert_eq!(check_preamble(&newer), Err(TraceError::Version { found: 9, known: 1 }));
    }
}
