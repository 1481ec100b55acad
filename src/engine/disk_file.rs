//! A stored prefix as a file: what it is for, its tokens, their picks and their keys and values, and a checksum over all.
//!
//! Never trusts a byte of it before the checksum has been seen to fit, except to say whose it is and which tokens.

use std::{
    fs::File,
    io::{self, Read, Write},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    kv::ChunkCounts,
    schedule::{SeqState, StoredPrefix},
    types::Token,
};

const MAGIC: [u8; 8] = *b"eldr-kv\n";
const VERSION: u32 = 1;
/// Magic, version and length of the header.
const N_FIXED: u64 = 16;
const N_CHECKSUM: u64 = 32;
/// A longer header is not ours.
const MAX_HEADER: u32 = 1 << 16;

/// What keys and values depend on besides the tokens, in words: name and value of each setting.
pub type Fingerprint = Vec<(String, String)>;

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// Of another program, model or setting.
    #[error("it is for {0}")]
    Foreign(String),
    /// Of another version of the format.
    #[error("its format is version {0} and this program reads version {VERSION}")]
    Version(u32),
    /// Not as long as it says.
    #[error("it has {n} bytes and should have {want}")]
    Torn {
        /// Bytes it has.
        n: u64,
        /// Bytes it should have.
        want: u64,
    },
    /// Something in it is not what was written.
    #[error("{0}")]
    Damaged(&'static str),
    /// It can not be read.
    #[error("it can not be read: {0}")]
    Io(#[from] io::Error),
}

/// The front of a file.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    fingerprint: Fingerprint,
    n_tokens: u32,
    whole: bool,
    layers: Vec<u32>,
    n_expert: u32,
    block: u32,
    n_row_bytes: u64,
    n_state_bytes: u64,
}

/// What a file says of itself; not verified.
#[derive(Debug)]
pub struct Summary {
    /// The tokens.
    pub tokens: Vec<Token>,
    /// MoE layers whose picks are known.
    pub layers: Vec<u32>,
    /// It can only be gone on from at its end.
    pub whole: bool,
    /// Bytes of the file.
    pub n_bytes: u64,
}

/// Bytes of the file of a prefix.
pub fn n_bytes(prefix: &StoredPrefix, fingerprint: &Fingerprint) -> u64 {
    header_of(prefix, fingerprint).n_bytes(encoded(&header_of(prefix, fingerprint)).len() as u64)
}

/// Writes a prefix.
pub fn write(file: &mut File, prefix: &StoredPrefix, fingerprint: &Fingerprint) -> io::Result<()> {
    let header = encoded(&header_of(prefix, fingerprint));
    let mut front = Vec::with_capacity(N_FIXED as usize + header.len() + prefix.tokens.len() * 4);
    front.extend(MAGIC);
    front.extend(VERSION.to_le_bytes());
    front.extend((header.len() as u32).to_le_bytes());
    front.extend(&header);
    front.extend(prefix.tokens.iter().flat_map(|token| token.to_le_bytes()));
    let rows = prefix.counts.as_ref().map_or(&[][..], ChunkCounts::rows);
    let mut checksum = Sha256::new();
    for part in [&front, rows, &prefix.state.bytes] {
        checksum.update(part);
        file.write_all(part)?;
    }
    file.write_all(&checksum.finalize())
}

/// Reads what a file says of itself.
pub fn summary(file: &mut File, fingerprint: &Fingerprint) -> Result<Summary, Refused> {
    let front = front(file, fingerprint)?;
    let Header { layers, whole, .. } = front.header;
    Ok(Summary { tokens: tokens(&front.tokens), layers, whole, n_bytes: front.n_bytes })
}

/// Reads and verifies a whole file.
pub fn read(file: &mut File, fingerprint: &Fingerprint) -> Result<StoredPrefix, Refused> {
    let Front { header, fixed, encoded, tokens: token_bytes, .. } = front(file, fingerprint)?;
    let rows = bytes(file, header.n_row_bytes)?;
    let state = bytes(file, header.n_state_bytes)?;
    let sum = bytes(file, N_CHECKSUM)?;
    let mut checksum = Sha256::new();
    for part in [&fixed[..], &encoded, &token_bytes, &rows, &state] {
        checksum.update(part);
    }
    if *checksum.finalize() != *sum {
        return Err(Refused::Damaged("its checksum does not fit its contents"));
    }
    let Header { n_tokens, whole, layers, n_expert, block, .. } = header;
    let n_rows = u64::from(n_tokens.div_ceil(block.max(1))) * layers.len() as u64 * u64::from(n_expert);
    if n_rows != rows.len() as u64 || !(1..=crate::kv::MAX_BLOCK).contains(&block) || !layers.is_sorted() {
        return Err(Refused::Damaged("its rows of counts are not those of its tokens"));
    }
    let counts = (!layers.is_empty())
        .then(|| ChunkCounts::from_rows(&Arc::from(layers.as_slice()), n_expert, block, n_tokens, rows));
    let state = SeqState { n_tokens, bytes: Arc::from(state) };
    Ok(StoredPrefix { tokens: tokens(&token_bytes), state, counts, whole })
}

struct Front {
    header: Header,
    fixed: [u8; N_FIXED as usize],
    encoded: Vec<u8>,
    tokens: Vec<u8>,
    n_bytes: u64,
}

fn front(file: &mut File, fingerprint: &Fingerprint) -> Result<Front, Refused> {
    let n = file.metadata()?.len();
    let mut fixed = [0; N_FIXED as usize];
    if n < N_FIXED {
        return Err(Refused::Torn { n, want: N_FIXED });
    }
    file.read_exact(&mut fixed)?;
    let [.., v0, v1, v2, v3, h0, h1, h2, h3] = fixed;
    if fixed[..8] != MAGIC {
        return Err(Refused::Foreign("another program".to_owned()));
    }
    let version = u32::from_le_bytes([v0, v1, v2, v3]);
    if version != VERSION {
        return Err(Refused::Version(version));
    }
    let n_header = u32::from_le_bytes([h0, h1, h2, h3]);
    if n_header > MAX_HEADER {
        return Err(Refused::Damaged("its header is too long"));
    }
    let want = N_FIXED + u64::from(n_header);
    if n < want {
        return Err(Refused::Torn { n, want });
    }
    let encoded = bytes(file, u64::from(n_header))?;
    let header: Header =
        serde_json::from_slice(&encoded).map_err(|_| Refused::Damaged("its header can not be read"))?;
    if let Some(differs) = difference(&header.fingerprint, fingerprint) {
        return Err(Refused::Foreign(differs));
    }
    let want = header.n_bytes(u64::from(n_header));
    if n != want {
        return Err(Refused::Torn { n, want });
    }
    let tokens = bytes(file, u64::from(header.n_tokens) * 4)?;
    Ok(Front { header, fixed, encoded, tokens, n_bytes: n })
}

/// The first setting that differs, in words.
fn difference(there: &Fingerprint, here: &Fingerprint) -> Option<String> {
    let differing = there.iter().zip(here).find(|(there, here)| there != here);
    match differing {
        Some(((name, there), (_, here))) => Some(format!("{name} {there}, not {here}")),
        None => (there.len() != here.len()).then(|| "other settings".to_owned()),
    }
}

impl Header {
    fn n_bytes(&self, n_header: u64) -> u64 {
        let parts = [N_FIXED, n_header, u64::from(self.n_tokens) * 4, self.n_row_bytes, self.n_state_bytes, N_CHECKSUM];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

fn header_of(prefix: &StoredPrefix, fingerprint: &Fingerprint) -> Header {
    let counts = prefix.counts.as_ref();
    Header {
        fingerprint: fingerprint.clone(),
        n_tokens: prefix.tokens.len() as u32,
        whole: prefix.whole,
        layers: prefix.layers().to_vec(),
        n_expert: counts.map_or(0, ChunkCounts::n_expert),
        block: counts.map_or(1, ChunkCounts::block),
        n_row_bytes: counts.map_or(0, |counts| counts.rows().len() as u64),
        n_state_bytes: prefix.state.bytes.len() as u64,
    }
}

fn encoded(header: &Header) -> Vec<u8> {
    serde_json::to_vec(header).expect("numbers and strings")
}

fn bytes(file: &mut File, n: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let n = usize::try_from(n).map_err(|_| io::ErrorKind::OutOfMemory)?;
    bytes.try_reserve_exact(n).map_err(|_| io::ErrorKind::OutOfMemory)?;
    bytes.resize(n, 0);
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn tokens(bytes: &[u8]) -> Vec<Token> {
    bytes.as_chunks::<4>().0.iter().map(|&bytes| Token::from_le_bytes(bytes)).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Seek;

    use super::*;

    fn settings() -> Fingerprint {
        vec![("model".to_owned(), "m".to_owned()), ("chunk".to_owned(), "64".to_owned())]
    }

    fn prefix() -> StoredPrefix {
        let layers: Arc<[u32]> = Arc::from([1, 4]);
        let mut counts = ChunkCounts::new(&layers, 3, 4, 0, 10, 0);
        (0..10).for_each(|index| counts.add(4, index, &[(index % 3) as u32]));
        let state = SeqState { n_tokens: 10, bytes: (0..200).collect() };
        StoredPrefix { tokens: (5..15).collect(), state, counts: Some(counts), whole: false }
    }

    fn written(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(bytes).expect("written");
        file.rewind().expect("rewound");
        file
    }

    fn good() -> Vec<u8> {
        let mut file = written(&[]);
        write(&mut file, &prefix(), &settings()).expect("written");
        file.rewind().expect("rewound");
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).expect("read");
        bytes
    }

    #[test]
    fn a_prefix_reads_back_as_written() {
        let bytes = good();
        assert_eq!(bytes.len() as u64, n_bytes(&prefix(), &settings()));
        let (got, want) = (read(&mut written(&bytes), &settings()).expect("whole"), prefix());
        assert_eq!((&got.tokens, &got.state, &got.counts, got.whole), (&want.tokens, &want.state, &want.counts, false));
        let summary = summary(&mut written(&bytes), &settings()).expect("whole");
        assert_eq!((summary.tokens, summary.layers), (want.tokens, vec![1, 4]));
        let bare = StoredPrefix { counts: None, whole: true, ..prefix() };
        let mut file = written(&[]);
        write(&mut file, &bare, &settings()).expect("written");
        file.rewind().expect("rewound");
        let got = read(&mut file, &settings()).expect("whole");
        assert!(got.counts.is_none() && got.whole);
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_refused() {
        let bytes = good();
        for n in 0..bytes.len() {
            let refused = read(&mut written(&bytes[..n]), &settings()).expect_err("torn");
            assert!(matches!(refused, Refused::Torn { .. }), "{n} bytes: {refused}");
            let mut changed = bytes.clone();
            changed[n] ^= 1 << (n % 8);
            assert!(read(&mut written(&changed), &settings()).is_err(), "byte {n}");
        }
        assert!(read(&mut written(&[&bytes[..], &[0]].concat()), &settings()).is_err());
    }

    #[test]
    fn another_model_version_or_program_is_named() {
        let bytes = good();
        let other = vec![("model".to_owned(), "m".to_owned()), ("chunk".to_owned(), "32".to_owned())];
        let refused = summary(&mut written(&bytes), &other).expect_err("foreign").to_string();
        assert_eq!(refused, "it is for chunk 64, not 32");
        let mut old = bytes.clone();
        old[8] = 9;
        let refused = summary(&mut written(&old), &settings()).expect_err("old").to_string();
        assert_eq!(refused, "its format is version 9 and this program reads version 1");
        let refused = summary(&mut written(b"a text of some length"), &settings()).expect_err("foreign").to_string();
        assert_eq!(refused, "it is for another program");
    }
}
