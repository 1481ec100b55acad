//! Prefixes in a folder, which several processes may share and which outlive them.
//!
//! Never shows a half-written file under its name, never waits for the disk while a prompt does (but to read what is
//! faster read than computed), and never stops serving because of the disk.
//!
//! Each prefix is a file, named by what it is for and its tokens. It is written by a thread of its own under a temporary
//! name, which is locked meanwhile, and renamed when it is whole. It is not synchronised: a file torn by a loss of power
//! fails its checksum. The folder is the truth; what is known of it is looked up again before each write, so that files
//! of other processes are found and count for the budget.

mod folder;

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use crossbeam::channel::{Receiver, Sender, bounded};
use folder::Folder;
use parking_lot::{Condvar, Mutex};

use crate::{
    engine::{
        EngineError, check_folder,
        disk_file::{self, Fingerprint},
    },
    schedule::{PrefixStore, StoredMatch, StoredPrefix, covers, has_layers, n_usable},
    types::Token,
};

/// Prefixes waiting to be written; one more is not.
const MAX_WAITING: usize = 4;

/// How often a wait for the writer looks whether there still is one.
const LOOK: Duration = Duration::from_millis(100);

/// What a disk tier has done since it was opened, and what is there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Prefixes in the folder that can be used.
    pub n_files: u64,
    /// Their bytes.
    pub n_bytes: u64,
    /// Files written.
    pub n_written: u64,
    /// Prefixes not written because the disk did not keep up.
    pub n_skipped: u64,
    /// Prefixes that could not be written.
    pub n_failed: u64,
    /// Prefixes read and verified.
    pub n_read: u64,
    /// Files that are not used: torn, damaged, of another version or for something else.
    pub n_refused: u64,
    /// Files removed to keep to the budget.
    pub n_removed: u64,
    /// What went wrong last.
    pub problem: Option<String>,
}

/// Prefixes in a folder, shared by all prefill workers. The last clone waits until what was stored is written.
#[derive(Clone)]
pub struct DiskTier {
    handle: Arc<Handle>,
    waits: bool,
}

struct Handle {
    inner: Arc<Inner>,
    to_writer: Option<Sender<Arc<StoredPrefix>>>,
    writer: Option<JoinHandle<()>>,
}

struct Inner {
    path: PathBuf,
    fingerprint: Fingerprint,
    max_bytes: u64,
    state: Mutex<State>,
    /// Signalled when a prefix was written, or not.
    written: Condvar,
}

struct State {
    folder: Folder,
    /// Prefixes that were given to the writer.
    n_pending: usize,
    stats: DiskStats,
    /// The problem that was logged last; the same one is not logged again until a write succeeds.
    told: Option<String>,
}

fn check_is_folder(path: &Path) -> Result<(), EngineError> {
    if path.exists() && !path.is_dir() {
        let path = path.display();
        let why = format!("the prefix cache {path} is not a folder; name one, or a name that is free");
        return Err(EngineError::Config(why));
    }
    Ok(())
}

impl DiskTier {
    /// Checks that a tier at `path` would be of use, and leaves nothing there. Errors: `path` is no folder, or prefixes can
    /// be neither written there nor, since there are none, read.
    pub fn check(path: &Path) -> Result<(), EngineError> {
        check_is_folder(path)?;
        match check_folder(path) {
            Err(error) if !folder::has_prefixes(path) => {
                Err(EngineError::Config(format!("prefixes can not be kept in the cache folder: {error}")))
            }
            _ => Ok(()),
        }
    }

    /// Opens `path`, which is made if it is not there, for prefixes that depend on what `fingerprint` says, at most
    /// `max_bytes` of them: where there are more, those that were not used for longest go now. Files there that can not be used are told of and left alone; a folder that can not be written
    /// is read only, and told of too. Errors: `path` is no folder, or a thread can not be started.
    pub fn open(path: &Path, fingerprint: Fingerprint, max_bytes: u64) -> Result<Self, EngineError> {
        check_is_folder(path)?;
        let made = std::fs::create_dir_all(path);
        let folder = Folder::new(path, &fingerprint);
        let state = State { folder, n_pending: 0, stats: DiskStats::default(), told: None };
        let inner =
            Inner { path: path.to_owned(), fingerprint, max_bytes, state: Mutex::new(state), written: Condvar::new() };
        let inner = Arc::new(inner);
        inner.state.lock().refresh(&inner);
        inner.state.lock().folder.remove_stale_parts();
        let probe = made.and_then(|()| inner.state.lock().folder.probe());
        let is_writable = probe.is_ok();
        if is_writable {
            // What was stored under a larger bound, or by a program without one.
            let mut state = inner.state.lock();
            state.stats.n_removed += state.folder.make_room(max_bytes);
        }
        if let Err(error) = probe {
            let why = format!("can not be written ({error}): prefixes are read from it and none are added");
            inner.state.lock().report(&inner.path, &why);
        }
        let (to_writer, writer) = if is_writable {
            let (sender, receiver) = bounded(MAX_WAITING);
            let of_thread = Arc::clone(&inner);
            let thread = std::thread::Builder::new().name("prefixes to disk".to_owned());
            let writer = thread.spawn(move || of_thread.write_all(&receiver));
            let no_thread =
                |error| EngineError::Config(format!("no thread could be started to write prefixes: {error}"));
            (Some(sender), Some(writer.map_err(no_thread)?))
        } else {
            (None, None)
        };
        Ok(Self { handle: Arc::new(Handle { inner, to_writer, writer }), waits: false })
    }

    /// What it has done and what is there.
    pub fn stats(&self) -> DiskStats {
        let state = self.handle.inner.state.lock();
        let (n_files, n_bytes) = state.folder.size();
        DiskStats { n_files, n_bytes, ..state.stats.clone() }
    }

    /// Stores a prefix that another store may have too, soon.
    pub(super) fn put_shared(&self, prefix: Arc<StoredPrefix>) {
        let Some(to_writer) = &self.handle.to_writer else { return };
        let state = &self.handle.inner.state;
        state.lock().n_pending += 1;
        // The writer runs as long as there is a sender.
        let is_sent = if self.waits { to_writer.send(prefix).is_ok() } else { to_writer.try_send(prefix).is_ok() };
        if !is_sent {
            let mut state = state.lock();
            state.n_pending -= 1;
            state.stats.n_skipped += 1;
        }
    }

    /// Waits until what was stored is written, or has failed.
    pub fn flush(&self) {
        let Inner { state, written, .. } = &*self.handle.inner;
        let mut state = state.lock();
        // A writer that panicked writes nothing more.
        let is_gone = || self.handle.writer.as_ref().is_none_or(JoinHandle::is_finished);
        while state.n_pending > 0 && !is_gone() {
            written.wait_for(&mut state, LOOK);
        }
    }
}

impl PrefixStore for DiskTier {
    fn find(&mut self, prompt: &[Token], layers: &[u32]) -> Option<StoredMatch> {
        let state = self.handle.inner.state.lock();
        let fitting = state.folder.entries().filter(|entry| has_layers(&entry.layers, layers));
        let common = fitting.map(|entry| (n_usable(&entry.tokens, entry.whole, prompt), entry));
        let (n_common, entry) = common.max_by_key(|(n, entry)| (*n, entry.id)).filter(|(n, _)| *n > 0)?;
        let n_tokens = entry.tokens.len() as u32;
        Some(StoredMatch { id: entry.id, tier: 0, n_tokens, n_common, n_bytes: entry.n_bytes })
    }

    fn load(&mut self, found: &StoredMatch) -> Option<Arc<StoredPrefix>> {
        self.handle.inner.load(found.id).map(Arc::new)
    }

    fn has(&self, tokens: &[Token], layers: &[u32]) -> bool {
        // What can not be written need not be copied out.
        self.handle.to_writer.is_none() || self.handle.inner.has(tokens, layers)
    }

    fn put(&mut self, prefix: StoredPrefix) {
        self.put_shared(Arc::new(prefix));
    }

    fn lasts(&self) -> bool {
        true
    }

    fn closing(&mut self) {
        self.waits = true;
    }
}

impl Inner {
    fn has(&self, tokens: &[Token], layers: &[u32]) -> bool {
        let state = self.state.lock();
        state.folder.entries().any(|old| covers(&old.tokens, old.whole, tokens) && has_layers(&old.layers, layers))
    }

    /// Reads a file without holding up those who only look.
    fn load(&self, id: u64) -> Option<StoredPrefix> {
        let (path, tokens) = self.state.lock().folder.path_and_tokens(id)?;
        let read = File::open(&path).map_err(disk_file::Refused::from).and_then(|mut file| {
            // The one that was used last goes last; where times can not be set, the oldest goes first.
            let _ = file.set_modified(std::time::SystemTime::now());
            disk_file::read(&mut file, &self.fingerprint)
        });
        let mut state = self.state.lock();
        match read {
            Ok(prefix) if prefix.tokens == tokens => {
                state.stats.n_read += 1;
                Some(prefix)
            }
            // Another process needed the room.
            Err(disk_file::Refused::Io(error)) if error.kind() == std::io::ErrorKind::NotFound => {
                state.folder.forget(id);
                None
            }
            other => {
                let why = other.map_or_else(|refused| refused.to_string(), |_| "it holds other tokens".to_owned());
                log::warn!("the stored prefix {} is not used: {why}", path.display());
                state.folder.refuse(id);
                state.stats.n_refused += 1;
                None
            }
        }
    }

    fn write_all(&self, prefixes: &Receiver<Arc<StoredPrefix>>) {
        for prefix in prefixes {
            self.write(&prefix);
            self.state.lock().n_pending -= 1;
            self.written.notify_all();
        }
    }

    fn write(&self, prefix: &StoredPrefix) {
        let n_bytes = disk_file::n_bytes(prefix, &self.fingerprint);
        let part = {
            let mut state = self.state.lock();
            state.refresh(self);
            let covered = |old: &folder::Entry| {
                covers(&old.tokens, old.whole, &prefix.tokens) && has_layers(&old.layers, prefix.layers())
            };
            if n_bytes > self.max_bytes || state.folder.entries().any(covered) {
                return;
            }
            state.stats.n_removed += state.folder.make_room(self.max_bytes - n_bytes);
            state.folder.part()
        };
        let written = part.and_then(|mut part| {
            disk_file::write(part.file(), prefix, &self.fingerprint)?;
            part.finish(&prefix.tokens)
        });
        let mut state = self.state.lock();
        match written {
            Ok(name) => {
                state.stats.n_written += 1;
                state.told = None;
                state.folder.add(name, prefix, n_bytes);
                // What the new one begins with is in it.
                state.folder.remove_covered(prefix);
            }
            Err(error) => {
                state.stats.n_failed += 1;
                state.report(&self.path, &format!("takes no more prefixes for now ({error}); serving goes on without"));
            }
        }
    }
}

impl State {
    /// Looks at the folder again.
    fn refresh(&mut self, inner: &Inner) {
        match self.folder.refresh(&inner.fingerprint) {
            Ok(refused) => self.stats.n_refused += refused,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => self.report(&inner.path, &format!("can not be read ({error})")),
        }
    }

    /// Logs a problem once.
    fn report(&mut self, path: &Path, why: &str) {
        let problem = format!("the prefix cache {} {why}", path.display());
        if self.told.as_ref() != Some(&problem) {
            log::warn!("{problem}");
        }
        self.told = Some(problem.clone());
        self.stats.problem = Some(problem);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.to_writer = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            log::error!("the thread that writes prefixes panicked");
        }
    }
}
