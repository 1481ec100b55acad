//! Files that are written: where one may go, and how it gets there whole.
//!
//! Never leaves a half-written file under the name asked for, and never replaces anything but a regular file.

use std::{
    fs::{self, File, FileType, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Links followed before a chain of them counts as a circle.
const MOST_LINKS: usize = 40;

/// Why a file can not be written somewhere.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// `-` where standard output is not meant.
    #[error("cannot write -: this output is a file, not standard output; name one, or ./- for a file of that name")]
    Dash,
    /// No name, or the name of a folder.
    #[error("cannot write `{}`: it is not the name of a file; give one", .0.display())]
    NoName(PathBuf),
    /// A device, a pipe, a socket, a folder, or a file that is open already.
    #[error("cannot write {}: it is {what}; choose a regular file or a new name", path.display())]
    NotAFile {
        /// The output.
        path: PathBuf,
        /// What it is, with its article.
        what: &'static str,
    },
    /// An input would be lost.
    #[error("cannot write {}: it is an input, {}; choose another output", path.display(), input.display())]
    IsInput {
        /// The output.
        path: PathBuf,
        /// The input it is.
        input: PathBuf,
    },
    /// Nothing can be made there.
    #[error("cannot write {}: {source}; choose a folder that exists and may be written", path.display())]
    Unwritable {
        /// The output.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// Checks that [`replace_file`] can write `path` without the loss of anything but the regular file there, by making
/// and removing a file beside it.
///
/// Returns the file that will be written: links are followed. Errors: `-`, anything that is no regular file, a process's
/// open file such as `/dev/stdout`, the file that standard input, output or error is, one of `inputs` (by whatever name),
/// a folder that is missing or may not be written.
pub fn check_output(path: &Path, inputs: &[&Path]) -> Result<PathBuf, OutputError> {
    let target = find_target(path)?;
    if let Some(input) = inputs.iter().find(|input| is_same(&target, input)) {
        return Err(OutputError::IsInput { path: path.into(), input: input.to_path_buf() });
    }
    #[cfg(unix)]
    if let Some(what) = stream_of(&target) {
        return Err(OutputError::NotAFile { path: path.into(), what });
    }
    let part = part_of(&target);
    File::create(&part)
        .and_then(|_| fs::remove_file(&part))
        .map_err(|source| OutputError::Unwritable { path: path.into(), source })?;
    Ok(target)
}

/// Checks that files can be made in the folder `path`, or in one that can be made there, by making and removing both.
pub fn check_folder(path: &Path) -> Result<(), OutputError> {
    let missing = path.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists());
    let missing: Vec<&Path> = missing.collect();
    let file = part_of(&path.join("eldr"));
    let made = fs::create_dir_all(path).and_then(|()| File::create(&file)).and_then(|_| fs::remove_file(&file));
    for folder in missing {
        // Somebody else may have put something there meanwhile.
        let _ = fs::remove_dir(folder);
    }
    made.map_err(|source| OutputError::Unwritable { path: path.into(), source })
}

/// Writes `bytes` to `path`, or to the file it links to. What was there is replaced in one step, once the new file is
/// whole and on disk, and keeps its permissions; after an error it is as it was.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_files(&[(path, bytes)]).map_err(|(_, error)| error)
}

/// Writes several files as [`replace_file`] does, each with its bytes, or none of them: all are whole and on disk before
/// the first takes its name. An error comes with the file it is about.
///
/// Only if a later one then can not take its name, which leaves nothing to go back to, are the new ones before it removed.
pub fn replace_files(files: &[(&Path, &[u8])]) -> Result<(), (PathBuf, io::Error)> {
    let mut parts = Parts(Vec::with_capacity(files.len()));
    for &(path, bytes) in files {
        let of_path = |error| (path.to_owned(), error);
        let target = find_target(path).map_err(|error| match error {
            OutputError::Unwritable { source, .. } => of_path(source),
            error => of_path(io::Error::new(io::ErrorKind::InvalidInput, error)),
        })?;
        let part = part_of(&target);
        parts.0.push((part.clone(), target.clone()));
        write_through(&part, &target, bytes).map_err(of_path)?;
    }
    for (n_renamed, (part, target)) in parts.0.iter().enumerate() {
        if let Err(error) = fs::rename(part, target) {
            // The first error is the one to report.
            for (_, renamed) in &parts.0[..n_renamed] {
                let _ = fs::remove_file(renamed);
            }
            return Err((files[n_renamed].0.to_owned(), error));
        }
    }
    Ok(())
}

/// Unfinished files and what they are to become; dropped, they are gone.
struct Parts(Vec<(PathBuf, PathBuf)>);

impl Drop for Parts {
    fn drop(&mut self) {
        for (part, _) in &self.0 {
            // After a rename there is nothing left under this name.
            let _ = fs::remove_file(part);
        }
    }
}

fn write_through(part: &Path, target: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(part)?;
    file.write_all(bytes)?;
    if let Ok(old) = fs::metadata(target) {
        file.set_permissions(old.permissions())?;
    }
    file.sync_all()
}

/// Beside the target, since a rename is only atomic within one file system.
fn part_of(target: &Path) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    target.with_file_name(name)
}

/// The file behind the links, its folder's name canonical; it is a regular file or does not exist.
fn find_target(path: &Path) -> Result<PathBuf, OutputError> {
    if path == Path::new("-") {
        return Err(OutputError::Dash);
    }
    let unwritable = |source| OutputError::Unwritable { path: path.into(), source };
    let mut target = path.to_owned();
    let mut n_links = 0;
    loop {
        match fs::symlink_metadata(&target) {
            Ok(found) if found.is_symlink() => {
                n_links += 1;
                if n_links > MOST_LINKS {
                    return Err(unwritable(io::Error::other("its links lead in a circle")));
                }
                let to = fs::read_link(&target).map_err(unwritable)?;
                // A link to a pipe or a socket of this process has no path to follow.
                if let Ok(found) = fs::metadata(&target)
                    && !found.is_file()
                {
                    return Err(OutputError::NotAFile { path: path.into(), what: kind(found.file_type()) });
                }
                if is_descriptor(&target) {
                    return Err(OutputError::NotAFile { path: path.into(), what: "a process's open file" });
                }
                target = folder_of(&target).join(to);
            }
            Ok(found) if found.is_file() => break,
            Ok(found) => return Err(OutputError::NotAFile { path: path.into(), what: kind(found.file_type()) }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            Err(error) => return Err(unwritable(error)),
        }
    }
    let Some(name) = target.file_name() else { return Err(OutputError::NoName(path.into())) };
    Ok(fs::canonicalize(folder_of(&target)).map_err(unwritable)?.join(name))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(unix)]
fn kind(found: FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt as _;
    match found {
        _ if found.is_dir() => "a folder",
        _ if found.is_fifo() => "a pipe",
        _ if found.is_socket() => "a socket",
        _ => "a device",
    }
}

#[cfg(not(unix))]
fn kind(found: FileType) -> &'static str {
    if found.is_dir() { "a folder" } else { "no regular file" }
}

/// Whether a link is one of those by which Linux names the open files of a process, as `/dev/stdout` does.
fn is_descriptor(link: &Path) -> bool {
    fs::canonicalize(folder_of(link)).is_ok_and(|folder| folder.starts_with("/proc") && folder.ends_with("fd"))
}

/// Which of this program's streams a file is, if one: what is written to it would come between.
#[cfg(unix)]
fn stream_of(target: &Path) -> Option<&'static str> {
    use std::os::{fd::AsFd as _, unix::fs::MetadataExt as _};
    let found = fs::metadata(target).ok()?;
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let streams = [
        (stdin.as_fd(), "this program's standard input"),
        (stdout.as_fd(), "this program's standard output"),
        (stderr.as_fd(), "this program's standard error"),
    ];
    let is_it = |stream: std::os::fd::BorrowedFd<'_>| {
        let stream = File::from(stream.try_clone_to_owned().ok()?).metadata().ok()?;
        Some((stream.dev(), stream.ino()) == (found.dev(), found.ino()))
    };
    streams.into_iter().find(|&(stream, _)| is_it(stream) == Some(true)).map(|(_, what)| what)
}

/// Whether both exist and are one file, by links of either kind.
fn is_same(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        if let (Ok(a), Ok(b)) = (fs::metadata(a), fs::metadata(b)) {
            return (a.dev(), a.ino()) == (b.dev(), b.ino());
        }
    }
    // Two outputs that are not there yet.
    matches!((find_target(a), find_target(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        let mut names: Vec<String> =
            entries.map(|e| e.expect("an entry").file_name().into_string().expect("a plain name")).collect();
        names.sort();
        names
    }

    #[test]
    fn a_link_is_kept_and_the_file_behind_it_replaced_with_its_permissions() {
        // Symptom: writing through a link replaced the link and left the real file old.
        let dir = tempfile::tempdir().expect("a folder");
        let (real, link, chain) = (dir.path().join("real"), dir.path().join("link"), dir.path().join("chain"));
        symlink("real", &link).expect("linked");
        symlink(&link, &chain).expect("linked");
        replace_file(&chain, b"new through a dangling link").expect("written");
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).expect("set");
        replace_file(&chain, b"two").expect("written");
        assert_eq!(fs::read(&real).expect("read"), b"two");
        assert_eq!(fs::metadata(&real).expect("there").permissions().mode() & 0o777, 0o640);
        assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
        assert_eq!(names(dir.path()), ["chain", "link", "real"]);
    }

    #[test]
    fn of_several_files_all_are_written_or_none() {
        // Symptom: on a full disk a report's numbers were there and its page was not.
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        fs::write(at("old"), "old").expect("written");
        fs::create_dir(at("folder")).expect("made");
        let (error_at, _) = replace_files(&[(&at("new"), b"1"), (&at("old"), b"2"), (&at("folder"), b"3")])
            .expect_err("a folder is in the way");
        assert_eq!(error_at, at("folder"));
        assert_eq!(
            (fs::read(at("old")).expect("there"), names(dir.path())),
            (b"old".to_vec(), vec!["folder".into(), "old".into()])
        );
        replace_files(&[(&at("new"), b"1"), (&at("old"), b"2")]).expect("written");
        assert_eq!(
            (fs::read(at("new")).expect("there"), fs::read(at("old")).expect("there")),
            (b"1".to_vec(), b"2".to_vec())
        );
        assert_eq!(names(dir.path()), ["folder", "new", "old"]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_is_tried_and_nothing_is_left_there() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::write(dir.path().join("file"), "mine").expect("written");
        for good in ["", "new", "new/deep/er"] {
            check_folder(&dir.path().join(good)).expect("writable");
        }
        for bad in [dir.path().join("file"), dir.path().join("file/x"), "/proc/eldr/x".into(), "/proc/self".into()] {
            let error = check_folder(&bad).expect_err("refused").to_string();
            assert!(error.starts_with(&format!("cannot write {}: ", bad.display())), "{error}");
        }
        assert_eq!(names(dir.path()), ["file"]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_open_file_of_a_process_is_refused() {
        // Symptom: `record -o /dev/stdout > t` wrote the trace and the report into one file.
        use std::os::fd::AsRawFd as _;
        let dir = tempfile::tempdir().expect("a folder");
        let file = File::create(dir.path().join("t")).expect("made");
        let link = dir.path().join("link");
        let number = file.as_raw_fd();
        symlink(format!("/proc/self/fd/{number}"), &link).expect("linked");
        let names =
            [format!("/dev/fd/{number}"), format!("/proc/self/fd/{number}"), format!("/proc/thread-self/fd/{number}")];
        for path in names.iter().map(Path::new).chain([link.as_path()]) {
            let error = check_output(path, &[]).expect_err("refused").to_string();
            assert!(error.contains("it is a process's open file; choose"), "{}: {error}", path.display());
        }
        assert!(check_output(&dir.path().join("t"), &[]).is_ok());
    }

    #[test]
    fn an_output_that_would_cost_something_else_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| dir.path().join(name);
        fs::write(at("input"), "mine").expect("written");
        fs::hard_link(at("input"), at("hard")).expect("linked");
        symlink("input", at("soft")).expect("linked");
        symlink("/dev/null", at("null")).expect("linked");
        symlink("circle", at("circle")).expect("linked");
        let before = names(dir.path());
        let input = at("./input");
        for name in ["input", "hard", "soft"] {
            let error = check_output(&at(name), &[&input]).expect_err(name);
            assert!(matches!(error, OutputError::IsInput { .. }), "{name}: {error}");
            assert!(check_output(&at(name), &[&at("other")]).is_ok(), "{name}");
        }
        for (path, want) in [
            (at("null"), "it is a device"),
            (PathBuf::from("/dev/null"), "it is a device"),
            (dir.path().into(), "it is a folder"),
            (at("circle"), "in a circle"),
            (at("no/such"), "No such file"),
            (at("input/x"), "Not a directory"),
            (PathBuf::from("-"), "./-"),
            (PathBuf::new(), "not the name of a file"),
        ] {
            let error = check_output(&path, &[]).expect_err(want).to_string();
            assert!(error.contains(want), "{}: {error}", path.display());
            assert!(replace_file(&path, b"new").is_err(), "{}", path.display());
        }
        assert_eq!(names(dir.path()), before);
        assert_eq!(fs::read(at("input")).expect("read"), b"mine");
    }
}
