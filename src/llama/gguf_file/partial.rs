//! What a GGUF file is until it is whole: a locked file beside the one asked for, which then becomes it.
//!
//! Never takes away what another process still writes, under either name.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    path::{Path, PathBuf},
};

use super::GgufError;

const SUFFIX: &str = ".partial";

/// The file while it is written; removed unless it takes the name asked for.
///
/// Its lock tells [`sweep`] that it is not stale. The system drops the lock with the process, however that ends.
pub(super) struct Partial {
    path: PathBuf,
    file: File,
}

impl Partial {
    /// An empty file of this process beside `target`.
    pub fn create(target: &Path) -> Result<Self, GgufError> {
        let path = path_of(target)?;
        let write = |source| GgufError::Io { action: "write", path: target.to_owned(), source };
        loop {
            let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path).map_err(write)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
                Err(TryLockError::Error(error)) => return Err(write(error)),
                Err(TryLockError::WouldBlock) => return Err(GgufError::Busy(target.to_owned())),
            }
            // Swept away between opening and locking; once it is locked, it no longer can be.
            if is_at(&file, &path) {
                file.set_len(0).map_err(write)?;
                return Ok(Self { path, file });
            }
        }
    }

    /// A second handle of the file, to write through.
    pub fn handle(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Becomes `target`, in place of what is there.
    pub fn replace(self, target: &Path) -> Result<(), GgufError> {
        fs::rename(&self.path, target).map_err(GgufError::io("write", target))
    }

    /// Becomes `target`, unless something is there.
    pub fn publish(self, target: &Path) -> Result<(), GgufError> {
        let refused = |error: io::Error| match error.kind() {
            io::ErrorKind::AlreadyExists => GgufError::Exists(target.to_owned()),
            _ => GgufError::Io { action: "write", path: target.to_owned(), source: error },
        };
        match fs::hard_link(&self.path, target) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                // No hard links on this file system: whoever creates the name has it.
                File::create_new(target).map_err(refused)?;
                fs::rename(&self.path, target).map_err(|error| {
                    let _ = fs::remove_file(target);
                    refused(error)
                })
            }
            linked => linked.map_err(refused),
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After a rename there is nothing left under this name.
        let _ = fs::remove_file(&self.path);
    }
}

/// Where this process puts `target` until it is whole.
pub(super) fn path_of(target: &Path) -> Result<PathBuf, GgufError> {
    let Some(name) = target.file_name() else {
        return Err(GgufError::Unwritable(format!("no name: {} is not a file name", target.display())));
    };
    let mut name = name.to_owned();
    name.push(format!(".{}{SUFFIX}", std::process::id()));
    Ok(target.with_file_name(name))
}

/// Removes the files of processes that ended before `target` was whole. What can not be removed stays.
pub(super) fn sweep(target: &Path) {
    let (Some(folder), Some(name)) = (target.parent(), target.file_name()) else { return };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let is_partial = |found: &str| {
        let number = found.strip_prefix(&*name.to_string_lossy()).and_then(|rest| rest.strip_prefix('.'));
        let number = number.and_then(|rest| rest.strip_suffix(SUFFIX));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && entry.file_name().to_str().is_some_and(is_partial) {
            let path = entry.path();
            // Whoever writes it holds its lock; ours is held until it is gone.
            if let Ok(file) = OpenOptions::new().write(true).open(&path)
                && file.try_lock().is_ok()
                && is_at(&file, &path)
            {
                let _ = fs::remove_file(&path);
            }
        }
    }
}

/// Whether `path` still names the open file.
fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        matches!((file.metadata(), fs::symlink_metadata(path)),
            (Ok(a), Ok(b)) if (a.dev(), a.ino()) == (b.dev(), b.ino()))
    }
    #[cfg(not(unix))]
    {
        // An open file can not be removed there.
        let _ = file;
        path.exists()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        let mut names: Vec<String> =
            entries.map(|e| e.expect("an entry").file_name().into_string().expect("a plain name")).collect();
        names.sort();
        names
    }

    // Symptom: gigabytes named k.gguf.PID.partial stayed for ever after kill -9.
    #[test]
    fn what_nobody_writes_any_more_is_swept_and_nothing_else() {
        let dir = tempfile::tempdir().expect("a folder");
        let target = dir.path().join("k.gguf");
        let kept = ["k.gguf", "k.gguf.1.partial.gguf", "k.gguf.x.partial", "k.gguf..partial", "other.gguf.7.partial"];
        for name in kept.into_iter().chain(["k.gguf.7.partial", "k.gguf.4294967295.partial"]) {
            fs::write(dir.path().join(name), "half").expect("written");
        }
        fs::create_dir(dir.path().join("k.gguf.8.partial")).expect("a folder");
        let live = Partial::create(&target).expect("created");
        sweep(&target);
        assert!(live.path.exists());
        drop(live);
        let mut want: Vec<String> = kept.map(str::to_owned).to_vec();
        want.push("k.gguf.8.partial".to_owned());
        want.sort();
        assert_eq!(names(dir.path()), want);
    }

    #[test]
    fn one_file_has_one_writer_and_starts_empty() {
        let dir = tempfile::tempdir().expect("a folder");
        let target = dir.path().join("k.gguf");
        fs::write(path_of(&target).expect("a name"), "left by a process of this number").expect("written");
        let first = Partial::create(&target).expect("created");
        assert_eq!(fs::metadata(&first.path).expect("there").len(), 0);
        assert!(matches!(Partial::create(&target), Err(GgufError::Busy(_))));
        drop(first);
        assert!(names(dir.path()).is_empty());
    }

    // Symptom: two programs with one output both ended well, and one of the files was silently lost.
    #[test]
    fn publishing_replaces_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let target = dir.path().join("k.gguf");
        let made = |text: &str| {
            let partial = Partial::create(&target).expect("created");
            fs::write(&partial.path, text).expect("written");
            partial
        };
        made("first").publish(&target).expect("new");
        assert!(matches!(made("second").publish(&target), Err(GgufError::Exists(_))));
        assert_eq!(
            (fs::read(&target).expect("there"), names(dir.path())),
            (b"first".to_vec(), vec!["k.gguf".to_owned()])
        );
        made("third").replace(&target).expect("replaced");
        assert_eq!(
            (fs::read(&target).expect("there"), names(dir.path())),
            (b"third".to_vec(), vec!["k.gguf".to_owned()])
        );
    }
}
