//! Whether the bytes of a safetensors file are those that were written.
//!
//! Never looks at what they mean.

use std::{fmt::Write, ops::Range};

use sha2::{Digest, Sha256};

/// The metadata entry that holds the checksum: SHA-256 of the whole file with the entry's 64 digits taken for zeros.
pub(super) const ENTRY: &str = "sha256";

/// What the entry holds until the file is sealed.
pub(super) const UNSEALED: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Where in `file` the digits are. Nothing but the entry reads like this: quotes inside of strings are escaped.
fn digits(file: &[u8]) -> Option<Range<usize>> {
    let before = format!("\"{ENTRY}\":\"");
    let start = before.len() + file.windows(before.len()).position(|window| window == before.as_bytes())?;
    let end = start + UNSEALED.len();
    (file.get(end) == Some(&b'"')).then_some(start..end)
}

/// Writes the checksum of `file` into its entry.
pub(super) fn seal(file: &mut [u8]) {
    let digits = digits(file).expect("the entry is in the metadata");
    let sum = sum(file, &digits);
    file[digits].copy_from_slice(sum.as_bytes());
}

/// True if the bytes of `file` are as they were when it was sealed.
pub(super) fn is_intact(file: &[u8]) -> bool {
    digits(file).is_some_and(|digits| sum(file, &digits).as_bytes() == &file[digits])
}

fn sum(file: &[u8], digits: &Range<usize>) -> String {
    let mut hash = Sha256::new();
    hash.update(&file[..digits.start]);
    hash.update(UNSEALED);
    hash.update(&file[digits.end..]);
    hex(&hash.finalize())
}

/// Two digits a byte.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("strings take everything");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_shows() {
        let mut file = format!("header {{\"{ENTRY}\":\"{UNSEALED}\"}} and data").into_bytes();
        assert!(!is_intact(&file));
        seal(&mut file);
        assert!(is_intact(&file));
        for bit in 0..8 * file.len() {
            file[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_intact(&file), "bit {bit}");
            file[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(!is_intact(b"\"sha256\":\"0123"));
    }

    #[test]
    fn the_hash_is_sha_256() {
        assert_eq!(hex(&Sha256::digest(b"abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
