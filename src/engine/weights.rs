use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

/// Places of each file that are looked at, and bytes at each.
const N_PLACES: u64 = 256;
const N_BYTES: u64 = 4096;

/// Tells a model's weights from those of another one of the same shape, such as another fine-tuning of the same base: a
/// hash over the lengths of its files and over bytes from all over them. A gigabyte or a terabyte takes the same time.
pub(super) fn sample(path: &Path) -> io::Result<String> {
    let mut hash = Sha256::new();
    for path in files(path) {
        let mut file = File::open(path)?;
        let n = file.metadata()?.len();
        hash.update(n.to_le_bytes());
        let mut bytes = Vec::with_capacity(N_BYTES as usize);
        for place in 0..N_PLACES {
            file.seek(SeekFrom::Start(n.saturating_sub(N_BYTES) / (N_PLACES - 1) * place))?;
            bytes.clear();
            (&mut file).take(N_BYTES).read_to_end(&mut bytes)?;
            hash.update(&bytes);
        }
    }
    let text = hash.finalize().iter().take(16).fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    Ok(text)
}

/// The file, or all parts of a model that comes in several: `name-00001-of-00003.gguf`.
fn files(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let parts = name.strip_suffix(".gguf").and_then(|stem| {
        let (stem, n) = stem.rsplit_once("-of-")?;
        let (stem, first) = stem.rsplit_once('-')?;
        (first.len() == 5 && n.len() == 5).then_some((stem, n.parse::<u32>().ok()?))
    });
    match parts {
        Some((stem, n)) => (1..=n).map(|i| path.with_file_name(format!("{stem}-{i:05}-of-{n:05}.gguf"))).collect(),
        None => vec![path.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_weights_of_the_same_length_are_told_apart_in_every_part() {
        let dir = tempfile::tempdir().expect("a folder");
        let parts = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"].map(|name| dir.path().join(name));
        let mut bytes = vec![7u8; 3 << 20];
        std::fs::write(&parts[0], &bytes[..5]).expect("written");
        std::fs::write(&parts[1], &bytes).expect("written");
        let first = sample(&parts[0]).expect("read");
        assert_eq!(sample(&parts[1]).expect("read"), first, "whichever part is named");
        bytes.iter_mut().skip(1 << 20).for_each(|byte| *byte = 8);
        std::fs::write(&parts[1], &bytes).expect("written");
        assert_ne!(sample(&parts[0]).expect("read"), first);
        assert!(sample(&dir.path().join("none.gguf")).is_err());
    }
}
