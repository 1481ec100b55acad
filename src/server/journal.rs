use std::{
    fs::{File, OpenOptions},
    io::Write as _,
    path::Path,
};

use parking_lot::Mutex;
use serde_json::Value;

use super::ServerError;

/// The request log: one JSON line for each choice that ended.
pub(super) struct Journal(Mutex<File>);

impl Journal {
    /// Goes on with the file at `path`, or starts it.
    pub fn open(path: &Path) -> Result<Self, ServerError> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.map_err(|error| ServerError::RequestLog(path.to_owned(), error))?;
        Ok(Self(Mutex::new(file)))
    }

    /// A line that can not be written is lost, and said to be.
    pub fn write(&self, line: &Value) {
        let text = format!("{line}\n");
        if let Err(error) = self.0.lock().write_all(text.as_bytes()) {
            log::warn!("a line of the request log is lost: {error}");
        }
    }
}
