//! ggml's backend libraries: where they are looked for, and why one that is there gives no device.
//!
//! Never takes a library out again: what can be loaded stays loaded.

use std::{
    env,
    ffi::{CString, OsString},
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use llama_cpp_sys_2 as sys;

use super::logging;

/// The only folder to look in, instead of those of the build, of the program and the working one.
const FOLDER: &str = "GGML_BACKEND_DIR";
/// One more library; ggml reads it too.
const FILE: &str = "GGML_BACKEND_PATH";

/// What ggml calls them: on macOS as on Linux.
const PREFIX: &str = if cfg!(windows) { "ggml-" } else { "libggml-" };
const SUFFIX: &str = if cfg!(windows) { ".dll" } else { ".so" };

/// A backend library that gives no device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusableLibrary {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it, as the loader or the backend says it.
    pub reason: String,
}

/// Loads what is there, the best of the CPU's variants included; gives the libraries that are of no use. Nothing to do
/// in a build that loads no libraries.
///
/// ggml passes over those in silence, so each is loaded here first, with its own words; ggml knows it then.
pub(super) fn load_all() -> Vec<UnusableLibrary> {
    if !cfg!(feature = "dynamic-backends") {
        return Vec::new();
    }
    let named = set(FILE).map(PathBuf::from);
    let unusable = first_of_each_name(&folders()).into_iter().chain(named).filter_map(|path| unusable(&path)).collect();
    match set(FOLDER).and_then(|folder| CString::new(folder.into_encoded_bytes()).ok()) {
        // SAFETY: the folder is a C string; ggml skips what is not there and what it knows.
        Some(folder) => unsafe { sys::ggml_backend_load_all_from_path(folder.as_ptr()) },
        // SAFETY: looks in the build's folder, beside the program and in the working folder.
        None => unsafe { sys::ggml_backend_load_all() },
    }
    unusable
}

/// Where libraries are looked for, for a message.
pub(super) fn places() -> String {
    folders().iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn set(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// In ggml's order.
fn folders() -> Vec<PathBuf> {
    if let Some(only) = set(FOLDER) {
        return vec![only.into()];
    }
    let built = sys::BACKENDS_DIR.map(PathBuf::from);
    let beside = env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned));
    built.into_iter().chain(beside).chain(env::current_dir().ok()).collect()
}

/// The libraries of devices, each from the first folder that has it: ggml looks no further even if that one is damaged,
/// and a second copy would be a second set of devices.
fn first_of_each_name(folders: &[PathBuf]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for folder in folders {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut here: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| is_device_library(path)).collect();
        here.retain(|path| found.iter().all(|known| known.file_name() != path.file_name()));
        here.sort();
        found.append(&mut here);
    }
    found
}

/// `libggml-cuda.so` and its like, but none of ggml's core, which is linked, and none of the CPU's, of which the best is
/// chosen.
fn is_device_library(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let backend = name.strip_suffix(SUFFIX).and_then(|name| name.strip_prefix(PREFIX));
    // RPC has no device until a server is named.
    backend.is_some_and(|name| !name.starts_with("cpu") && name != "base" && name != "rpc")
}

/// Loads it; what is wrong with it, if anything, also goes to the log.
fn unusable(path: &Path) -> Option<UnusableLibrary> {
    if is_cut_off(path) {
        // Nothing can be done but to say it first: ggml loads whatever has the name.
        log::error!("{} is cut off, and loading it may end the process: copy it again", path.display());
    }
    let text = CString::new(path.as_os_str().as_encoded_bytes()).ok()?;
    logging::clear_errors();
    // SAFETY: the path is a C string; a library that is loaded already is registered once.
    let registered = unsafe { sys::ggml_backend_load(text.as_ptr()) };
    let said = after_path(&logging::take_errors(), path);
    let reason = if registered.is_null() {
        let reason = if said.is_empty() { "it is not made for this machine".to_owned() } else { said };
        log::warn!("{} cannot be used: {reason}", path.display());
        reason
    } else {
        // SAFETY: the backend is registered, for as long as the process lives.
        let n_devices = unsafe { sys::ggml_backend_reg_dev_count(registered) };
        if n_devices > 0 {
            return None;
        }
        let why = if said.is_empty() { "there is none, or its driver is missing" } else { &said };
        log::info!("{} finds no device: {why}", path.display());
        format!("it is loaded, but finds no device: {why}")
    };
    Some(UnusableLibrary { path: path.to_owned(), reason })
}

/// Whether an ELF file ends before its table of sections, which is its last part. The system's loader maps such a file all
/// the same, and the process dies over the first page that is not there.
fn is_cut_off(path: &Path) -> bool {
    let mut head = [0; 64];
    let read = File::open(path).and_then(|mut file| {
        file.read_exact(&mut head)?;
        Ok(file.metadata()?.len())
    });
    let Ok(length) = read else { return false };
    let number = |at: usize, n: usize| head[at..at + n].iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte));
    // Of 64 bits, the lowest byte first.
    head.starts_with(b"\x7fELF\x02\x01") && number(40, 8).saturating_add(number(58, 2) * number(60, 2)) > length
}

/// The reason without "failed to load PATH: " in front of it.
fn after_path(reason: &str, path: &Path) -> String {
    let path = path.display().to_string();
    let (_, rest) = reason.split_once(&path).unwrap_or(("", reason));
    let rest = rest.trim_start_matches(": ");
    // The loader begins with the path, too, where the file itself is at fault.
    rest.strip_prefix(&path).unwrap_or(rest).trim_start_matches(": ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::Backend;

    fn named(folder: &Path, backend: &str) -> PathBuf {
        folder.join(format!("{PREFIX}{backend}{SUFFIX}"))
    }

    #[test]
    fn device_libraries_are_told_by_their_name() {
        let name = |backend: &str| named(Path::new("/somewhere"), backend);
        assert!(["cuda", "vulkan", "hip", "opencl"].iter().all(|backend| is_device_library(&name(backend))));
        assert!(["base", "cpu", "cpu-haswell", "rpc"].iter().all(|backend| !is_device_library(&name(backend))));
        assert!(!is_device_library(Path::new("/somewhere/libggml.so")));
        assert!(!is_device_library(Path::new("/somewhere/libggml-cuda.so.0")));
    }

    // Symptom: a library both in the build's folder and beside the program gave its devices twice.
    #[test]
    fn of_two_copies_the_first_folders_counts() {
        let dir = tempfile::tempdir().expect("a folder");
        let folders = ["b", "a", "missing"].map(|name| dir.path().join(name));
        let [first, second, _] = &folders;
        for (folder, backend) in [(first, "vulkan"), (first, "cpu-haswell"), (second, "vulkan"), (second, "cuda")] {
            fs::create_dir_all(folder).expect("made");
            fs::write(named(folder, backend), "").expect("written");
        }
        assert_eq!(first_of_each_name(&folders), [named(first, "vulkan"), named(second, "cuda")]);
    }

    #[test]
    fn a_file_that_is_no_library_is_unusable_and_says_why() {
        Backend::init();
        let dir = tempfile::tempdir().expect("a folder");
        let path = named(dir.path(), "cuda");
        let missing = unusable(&path).expect("there is none").reason;
        fs::write(&path, "not a library").expect("written");
        let damaged = unusable(&path).expect("it is none");
        assert_eq!(damaged.path, path);
        assert_ne!(damaged.reason, missing);
        for reason in [missing, damaged.reason] {
            assert!(!reason.is_empty() && !reason.contains(dir.path().to_str().expect("a path")), "{reason}");
        }
    }

    // Symptom: half a library ended the process with a bus error and no word.
    #[test]
    #[cfg(all(target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
    fn a_file_without_its_end_is_cut_off() {
        let dir = tempfile::tempdir().expect("a folder");
        let whole = env::current_exe().expect("this test");
        let bytes = fs::read(&whole).expect("readable");
        let is_cut_off_at = |n: usize| {
            let path = dir.path().join("part");
            fs::write(&path, &bytes[..n]).expect("written");
            is_cut_off(&path)
        };
        assert!(!is_cut_off(&whole) && !is_cut_off(dir.path()));
        assert!(is_cut_off_at(4096) && is_cut_off_at(bytes.len() - 1));
        // The loader says it of these.
        assert!(!is_cut_off_at(0) && !is_cut_off_at(63));
    }

    #[test]
    fn a_reason_does_not_repeat_the_path() {
        let path = Path::new("/a/libggml-cuda.so");
        for reason in [
            "failed to load /a/libggml-cuda.so: libcuda.so.1: cannot open shared object file",
            "failed to load /a/libggml-cuda.so: /a/libggml-cuda.so: libcuda.so.1: cannot open shared object file",
        ] {
            assert_eq!(after_path(reason, path), "libcuda.so.1: cannot open shared object file");
        }
        assert_eq!(after_path("it gave no reason", path), "it gave no reason");
    }
}
