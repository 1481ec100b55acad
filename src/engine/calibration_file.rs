//! Calibrations on disk: read whole, replaced whole.
//!
//! Never leaves a half-written file under the name asked for.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::replace_file;
use crate::calibrate::{Calibration, FormatError, decode, encode};

/// Why a calibration was not read or written.
///
/// ```
/// use eldr::engine::{CalibrationFileError, read_calibration};
///
/// let error = read_calibration("no/such/file".as_ref()).unwrap_err();
/// assert!(matches!(error, CalibrationFileError::Read { .. }) && error.to_string().contains("no/such/file"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationFileError {
    /// The file could not be read.
    #[error("cannot read calibration `{}`: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file could not be written; what was there before is unchanged.
    #[error("cannot write calibration `{}`: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is not a calibration.
    #[error("cannot use calibration `{}`: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
}

/// Reads and verifies a calibration file.
pub fn read_calibration(path: &Path) -> Result<Calibration, CalibrationFileError> {
    let bytes = fs::read(path).map_err(|source| CalibrationFileError::Read { path: path.into(), source })?;
    decode(&bytes).map_err(|source| CalibrationFileError::Format { path: path.into(), source })
}

/// Writes a calibration file, as [`replace_file`] does: after an error, what was there is as it was.
pub fn write_calibration(path: &Path, calibration: &Calibration) -> Result<(), CalibrationFileError> {
    replace_file(path, &encode(calibration)).map_err(|source| CalibrationFileError::Write { path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use ndarray::array;

    use super::*;
    use crate::{calibrate::TauOrigin, types::MoeShape};

    fn calibration(seed: u64) -> Calibration {
        Calibration {
            shape: MoeShape { layers: vec![0, 1], n_layer: 2, n_expert: 2, n_expert_used: 1 },
            fingerprint: "test".into(),
            idf: array![[0.5f32, 1.0], [0.0, 0.0]],
            layers: vec![0],
            centroids: array![[1.0f32, 0.0], [0.0, 1.0]],
            n_requests: 4,
            n_tokens: 40,
            rho: 0.5,
            tau: 0.1,
            cost: 0.25,
            seed,
            load_model: None,
            tau_origin: TauOrigin::Default,
            capacity: None,
            verdict: None,
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        let mut names: Vec<String> =
            entries.map(|e| e.expect("an entry").file_name().into_string().expect("a plain name")).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_written_is_read_and_replaced_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.safetensors");
        for seed in [1, 2] {
            write_calibration(&path, &calibration(seed)).expect("written");
            assert_eq!(read_calibration(&path).expect("read"), calibration(seed));
        }
        assert_eq!(names(folder.path()), ["a.safetensors"]);
    }

    #[test]
    fn a_failed_write_leaves_nothing_behind() {
        let folder = tempfile::tempdir().expect("a folder");
        let taken = folder.path().join("taken");
        fs::create_dir(&taken).expect("a folder");
        let error = write_calibration(&taken, &calibration(1)).expect_err("a folder is in the way");
        assert!(error.to_string().starts_with("cannot write calibration `"), "{error}");
        let nowhere = folder.path().join("no/such/folder/a.safetensors");
        assert!(write_calibration(&nowhere, &calibration(1)).is_err());
        assert_eq!(names(folder.path()), ["taken"]);
    }

    #[test]
    fn a_bad_file_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("b.safetensors");
        let error = read_calibration(&path).expect_err("no file").to_string();
        assert!(error.contains("cannot read") && error.contains("b.safetensors"), "{error}");
        write_calibration(&path, &calibration(1)).expect("written");
        let bytes = fs::read(&path).expect("bytes");
        fs::write(&path, &bytes[..bytes.len() - 1]).expect("cut short");
        let error = read_calibration(&path).expect_err("cut short").to_string();
        assert!(error.contains("cannot use") && error.contains("b.safetensors"), "{error}");
    }
}
