//! Files and folders that opening something makes, and that a check takes away again.
//!
//! Never removes what was there before, nor what has something in it.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// What was not there; dropped, it removes what has come to be, as far as it is empty.
pub struct Made(Vec<PathBuf>);

impl Made {
    /// The paths, and the folders they are in, that are not there now.
    pub fn by_opening<'a>(paths: impl IntoIterator<Item = &'a Option<PathBuf>>) -> Self {
        let folders = paths.into_iter().flatten().flat_map(|path| path.ancestors());
        let missing = folders.filter(|path| !path.as_os_str().is_empty() && fs::symlink_metadata(path).is_err());
        let mut missing: Vec<PathBuf> = missing.map(Path::to_owned).collect();
        // What is inside goes first.
        missing.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
        Self(missing)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for path in &self.0 {
            let is_empty = fs::symlink_metadata(path).is_ok_and(|facts| facts.is_file() && facts.len() == 0);
            // A folder with something in it stays, and what was never made is not there to be removed.
            let _ = if is_empty { fs::remove_file(path) } else { fs::remove_dir(path) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_made_goes_and_all_else_stays() {
        let dir = tempfile::tempdir().expect("a folder");
        let at = |name: &str| Some(dir.path().join(name));
        fs::create_dir(dir.path().join("old")).expect("made");
        fs::write(dir.path().join("old-log"), "").expect("written");
        let paths = [at("new/inner"), at("old"), at("log"), at("old-log"), at("full"), at("never"), None];
        let made = Made::by_opening(&paths);
        fs::create_dir_all(dir.path().join("new/inner")).expect("made");
        fs::write(dir.path().join("log"), "").expect("written");
        fs::write(dir.path().join("full"), "text").expect("written");
        drop(made);
        let mut left: Vec<_> =
            fs::read_dir(dir.path()).expect("there").map(|file| file.expect("read").file_name()).collect();
        left.sort();
        assert_eq!(left, ["full", "old", "old-log"]);
    }
}
