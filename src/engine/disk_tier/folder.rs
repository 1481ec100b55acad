//! The files of a folder of prefixes: which are there, which may go, and how one comes to be.
//!
//! Never reads keys and values.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::{
    engine::disk_file::{self, Fingerprint, Refused},
    rng::mix,
    schedule::{StoredPrefix, has_layers},
    types::Token,
};

const SUFFIX: &str = ".eldrkv";
const PART: &str = ".eldrkv.part";

/// What is known of a file.
pub struct Entry {
    /// Its number in this process.
    pub id: u64,
    /// The tokens.
    pub tokens: Vec<Token>,
    /// MoE layers whose picks are known.
    pub layers: Vec<u32>,
    /// It can only be gone on from at its end.
    pub whole: bool,
    /// Bytes of the file.
    pub n_bytes: u64,
    used: SystemTime,
}

pub struct Folder {
    path: PathBuf,
    /// What the names of its own files begin with.
    own: String,
    /// By name.
    entries: BTreeMap<String, Entry>,
    /// Files that are not used, by name, with their bytes and times.
    refused: BTreeMap<String, (u64, SystemTime)>,
    n_ids: u64,
    n_parts: u64,
}

/// Whether there is a prefix in the folder `path`, for whatever model.
pub fn has_prefixes(path: &Path) -> bool {
    let mut files = fs::read_dir(path).into_iter().flatten().flatten();
    files.any(|file| file.file_name().to_string_lossy().ends_with(SUFFIX))
}

impl Folder {
    pub fn new(path: &Path, fingerprint: &Fingerprint) -> Self {
        let texts = fingerprint.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]);
        let own = format!("{:016x}-", crate::kv::BlockName::root(texts).0);
        let (entries, refused) = (BTreeMap::new(), BTreeMap::new());
        Self { path: path.to_owned(), own, entries, refused, n_ids: 0, n_parts: 0 }
    }

    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// Files that can be used, and their bytes.
    pub fn size(&self) -> (u64, u64) {
        (self.entries.len() as u64, self.entries().map(|entry| entry.n_bytes).sum())
    }

    /// Takes in which files are there now; how many new ones are not used. Each of these is logged once: those for
    /// something else together.
    pub fn refresh(&mut self, fingerprint: &Fingerprint) -> io::Result<u64> {
        let mut there = BTreeSet::new();
        let mut foreign: Vec<String> = Vec::new();
        let mut n_refused = 0;
        for file in fs::read_dir(&self.path)? {
            let file = file?;
            let Ok(name) = file.file_name().into_string() else { continue };
            let Ok(facts) = file.metadata() else { continue };
            if !name.ends_with(SUFFIX) || !facts.is_file() {
                continue;
            }
            let used = facts.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            there.insert(name.clone());
            if let Some(entry) = self.entries.get_mut(&name).filter(|entry| entry.n_bytes == facts.len()) {
                entry.used = used;
                continue;
            }
            if self.refused.get(&name).is_some_and(|&(n_bytes, _)| n_bytes == facts.len()) {
                continue;
            }
            self.entries.remove(&name);
            let read = File::open(file.path()).map_err(Refused::from);
            match read.and_then(|mut opened| disk_file::summary(&mut opened, fingerprint)) {
                Ok(summary) => {
                    self.refused.remove(&name);
                    self.n_ids += 1;
                    let disk_file::Summary { tokens, layers, whole, n_bytes } = summary;
                    self.entries.insert(name, Entry { id: self.n_ids, tokens, layers, whole, n_bytes, used });
                }
                Err(refused) => {
                    n_refused += 1;
                    match refused {
                        Refused::Foreign(why) => foreign.push(why),
                        other => log::warn!("the stored prefix {} is not used: {other}", file.path().display()),
                    }
                    self.refused.insert(name, (facts.len(), used));
                }
            }
        }
        if let Some(why) = foreign.first() {
            let (n, path) = (foreign.len(), self.path.display());
            log::info!("{n} prefixes in {path} are left alone: the first is for {why}");
        }
        self.entries.retain(|name, _| there.contains(name));
        self.refused.retain(|name, _| there.contains(name));
        Ok(n_refused)
    }

    /// Removes what processes left behind that were killed while they wrote: nobody locks it any more.
    pub fn remove_stale_parts(&self) {
        let Ok(files) = fs::read_dir(&self.path) else { return };
        for file in files.flatten() {
            if file.file_name().to_string_lossy().ends_with(PART)
                && let Ok(part) = File::options().write(true).open(file.path())
                && part.try_lock().is_ok()
            {
                // If it can not be removed it is in nobody's way.
                let _ = fs::remove_file(file.path());
            }
        }
    }

    /// Whether a file can be made here.
    pub fn probe(&mut self) -> io::Result<()> {
        self.part().map(drop)
    }

    /// A file under a temporary name, locked; removed again unless it is finished.
    pub fn part(&mut self) -> io::Result<Part> {
        self.n_parts += 1;
        let name = format!("{}{}-{}{PART}", self.own, std::process::id(), self.n_parts);
        let path = self.path.join(name);
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(&path)?;
        let part = Part { file, path, own: self.own.clone() };
        match part.file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => Err(io::Error::other("another process takes the file for abandoned")),
            // Where files can not be locked, parts of others are never taken for abandoned either.
            Ok(()) | Err(fs::TryLockError::Error(_)) => Ok(part),
        }
    }

    pub fn add(&mut self, name: String, prefix: &StoredPrefix, n_bytes: u64) {
        self.n_ids += 1;
        let (tokens, layers) = (prefix.tokens.clone(), prefix.layers().to_vec());
        let entry = Entry { id: self.n_ids, tokens, layers, whole: prefix.whole, n_bytes, used: SystemTime::now() };
        self.refused.remove(&name);
        self.entries.insert(name, entry);
    }

    /// Removes those that were not used for longest until the others take at most `max_bytes`; how many. Files of its own
    /// that are not used count and go too; those for something else are not its.
    pub fn make_room(&mut self, max_bytes: u64) -> u64 {
        let own = self.refused.iter().filter(|(name, _)| name.starts_with(&self.own));
        let mut files: Vec<(SystemTime, String, u64)> = own
            .map(|(name, &(n_bytes, used))| (used, name.clone(), n_bytes))
            .chain(self.entries.iter().map(|(name, entry)| (entry.used, name.clone(), entry.n_bytes)))
            .collect();
        files.sort();
        let mut n_bytes: u64 = files.iter().map(|(.., n)| n).sum();
        let mut n_removed = 0;
        for (_, name, n) in files {
            if n_bytes <= max_bytes {
                break;
            }
            self.remove(&name);
            n_bytes -= n;
            n_removed += 1;
        }
        n_removed
    }

    /// Removes those that a new one makes superfluous.
    pub fn remove_covered(&mut self, new: &StoredPrefix) {
        let is_covered = |entry: &Entry| {
            entry.tokens.len() < new.tokens.len()
                && new.covers(&entry.tokens, &[])
                && has_layers(new.layers(), &entry.layers)
        };
        let names: Vec<String> =
            self.entries.iter().filter(|(_, entry)| is_covered(entry)).map(|(name, _)| name.clone()).collect();
        for name in names {
            self.remove(&name);
        }
    }

    pub fn path_and_tokens(&self, id: u64) -> Option<(PathBuf, Vec<Token>)> {
        let (name, entry) = self.entries.iter().find(|(_, entry)| entry.id == id)?;
        Some((self.path.join(name), entry.tokens.clone()))
    }

    /// The file is gone.
    pub fn forget(&mut self, id: u64) {
        self.entries.retain(|_, entry| entry.id != id);
    }

    /// The file is damaged: it is not looked at again, and goes when room is needed.
    pub fn refuse(&mut self, id: u64) {
        let Some(name) = self.entries.iter().find(|(_, entry)| entry.id == id).map(|(name, _)| name.clone()) else {
            return;
        };
        if let Some(entry) = self.entries.remove(&name) {
            self.refused.insert(name, (entry.n_bytes, entry.used));
        }
    }

    fn remove(&mut self, name: &str) {
        // Another process may have removed it, or it can not be removed: then it is found again next time.
        let _ = fs::remove_file(self.path.join(name));
        self.entries.remove(name);
        self.refused.remove(name);
    }
}

/// A file that is being written.
pub struct Part {
    file: File,
    path: PathBuf,
    own: String,
}

impl Part {
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives it its name, by its tokens.
    pub fn finish(self, tokens: &[Token]) -> io::Result<String> {
        let hash = tokens.iter().fold(0, |hash, token| mix(hash ^ u64::from(token.cast_unsigned())));
        let name = format!("{}{hash:016x}-{}{SUFFIX}", self.own, tokens.len());
        fs::rename(&self.path, self.path.with_file_name(&name))?;
        Ok(name)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // After a rename there is nothing left under this name.
        let _ = fs::remove_file(&self.path);
    }
}
