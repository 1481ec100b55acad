use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::Path,
};

use parking_lot::Mutex;
use serde_json::Value;

use super::ServerError;

/// The request log: one JSON line for each choice that ended.
pub(super) struct Journal(Mutex<Lines<File>>);

impl Journal {
    /// Goes on with the file at `path`, or starts it.
    pub fn open(path: &Path) -> Result<Self, ServerError> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.map_err(|error| ServerError::RequestLog(path.to_owned(), error))?;
        Ok(Self(Mutex::new(Lines { to: file, n_lost: 0 })))
    }

    /// A line that can not be written is lost. The first of several is said to be, and how many they were.
    pub fn write(&self, line: &Value) {
        if let Some(warning) = self.0.lock().write(&format!("{line}\n")) {
            log::warn!("{warning}");
        }
    }
}

struct Lines<W> {
    to: W,
    /// Since one was last written.
    n_lost: u64,
}

impl<W: Write> Lines<W> {
    /// What there is to say about it, if anything.
    fn write(&mut self, line: &str) -> Option<String> {
        match self.to.write_all(line.as_bytes()) {
            Ok(()) => match std::mem::take(&mut self.n_lost) {
                0 => None,
                n => Some(format!("the request log is written again; lines that are lost: {n}")),
            },
            Err(error) => {
                self.n_lost += 1;
                (self.n_lost == 1)
                    .then(|| format!("the request log can not be written ({error}): its lines are lost until it can"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// Takes lines while it is not full.
    struct Disk {
        is_full: bool,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.is_full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(bytes.len()) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    // Symptom: a full disk was warned of once for each request.
    #[test]
    fn a_full_disk_is_warned_of_once_until_it_takes_lines_again() {
        let mut lines = Lines { to: Disk { is_full: false }, n_lost: 0 };
        assert_eq!(lines.write("a\n"), None);
        for _ in 0..2 {
            lines.to.is_full = true;
            assert!(lines.write("b\n").is_some_and(|warning| warning.contains("can not be written")));
            assert_eq!((lines.write("c\n"), lines.write("d\n")), (None, None));
            lines.to.is_full = false;
            assert_eq!(lines.write("e\n").as_deref(), Some("the request log is written again; lines that are lost: 3"));
            assert_eq!(lines.write("f\n"), None);
        }
    }
}
