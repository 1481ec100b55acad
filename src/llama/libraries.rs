//! Which ggml backend libraries are beside the program and cannot be used, and why.
//!
//! Never takes a library out again: what can be loaded stays loaded.

use std::{
    env,
    ffi::CString,
    fs,
    path::{Path, PathBuf},
};

use llama_cpp_sys_2 as sys;

use super::{backend::Backend, logging};

/// A backend library that gives no device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusableLibrary {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it, as the loader says it.
    pub reason: String,
}

impl Backend {
    /// The libraries of ggml backends that are where this build looks for them and give no device. None in a build that
    /// loads no libraries.
    ///
    /// ggml passes them over in silence. Tries to load each, so that its own start-up runs.
    pub fn unusable_libraries(&self) -> Vec<UnusableLibrary> {
        if !cfg!(feature = "dynamic-backends") {
            return Vec::new();
        }
        let mut folders: Vec<PathBuf> = sys::BACKENDS_DIR.map(PathBuf::from).into_iter().collect();
        folders.extend(env::current_exe().ok().and_then(|path| path.parent().map(Path::to_owned)));
        folders.extend(env::current_dir().ok());
        let mut found: Vec<PathBuf> = folders.iter().flat_map(|folder| libraries(folder)).collect();
        found.sort();
        found.dedup();
        found
            .into_iter()
            .filter_map(|path| why_unusable(&path).map(|reason| UnusableLibrary { path, reason }))
            .collect()
    }
}

/// The files of a folder that are named as a backend of a device.
fn libraries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| is_device_library(path)).collect()
}

/// `libggml-cuda.so` and its like, but none of ggml's core, which is linked, and none of the CPU's, of which the best is
/// chosen.
fn is_device_library(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let stem = name.strip_suffix(env::consts::DLL_SUFFIX).and_then(|name| name.strip_prefix(env::consts::DLL_PREFIX));
    let backend = stem.and_then(|stem| stem.strip_prefix("ggml-"));
    // RPC has no device until a server is named.
    backend.is_some_and(|name| !name.starts_with("cpu") && name != "base" && name != "rpc")
}

fn why_unusable(path: &Path) -> Option<String> {
    let text = CString::new(path.to_str()?).ok()?;
    logging::clear_errors();
    // SAFETY: the path is a C string; a library that is loaded already is registered once.
    let registered = unsafe { sys::ggml_backend_load(text.as_ptr()) };
    if registered.is_null() {
        return Some(after_path(&logging::take_reason(), path));
    }
    // SAFETY: the backend is registered, for as long as the process lives.
    let n_devices = unsafe { sys::ggml_backend_reg_dev_count(registered) };
    (n_devices == 0).then(|| "it is loaded, but finds no device: is there one, and is its driver installed?".to_owned())
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

    #[test]
    fn device_libraries_are_told_by_their_name() {
        let name = |backend: &str| {
            let (prefix, suffix) = (env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX);
            PathBuf::from(format!("/somewhere/{prefix}ggml-{backend}{suffix}"))
        };
        assert!(["cuda", "vulkan", "hip", "opencl"].iter().all(|backend| is_device_library(&name(backend))));
        assert!(["base", "cpu", "cpu-haswell", "rpc"].iter().all(|backend| !is_device_library(&name(backend))));
        assert!(!is_device_library(Path::new("/somewhere/libggml.so")));
        assert!(!is_device_library(Path::new("/somewhere/libggml-cuda.so.0")));
    }

    #[test]
    fn a_file_that_is_no_library_is_unusable_and_says_why() {
        Backend::init();
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join(format!("{}ggml-cuda{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX));
        fs::write(&path, "not a library").expect("written");
        assert_eq!(libraries(dir.path()), std::slice::from_ref(&path));
        let reason = why_unusable(&path).expect("unusable");
        assert!(!reason.is_empty() && !reason.contains(dir.path().to_str().expect("a path")), "{reason}");
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
