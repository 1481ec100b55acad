//! What a GGUF file holds and how one is written, through llama.cpp's own `gguf_*` functions (ggml/include/gguf.h).
//!
//! Never loads a model, and never holds the data of more than the tensor it is working on.
//!
//! ```
//! use eldr::llama::gguf_file::{Array, GgufError, GgufFile, GgufWriter, Sink, TensorInfo, TensorType, Value};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("tiny.gguf");
//! // A file of one tensor.
//! let mut writer = GgufWriter::new();
//! writer.set("general.architecture", "toy")?;
//! writer.set("toy.sizes", Value::Array(Array::U32(vec![1, 2])))?;
//! writer.add_tensor("weights", TensorType::from_name("f32").expect("a type of ggml's"), &[4])?;
//! writer.write(&path, |_, sink: &mut Sink| sink.put(&1f32.to_le_bytes().repeat(4)))?;
//!
//! let file = GgufFile::open(&path)?;
//! let weights: &TensorInfo = file.tensor("weights").expect("it is there");
//! assert_eq!((file.architecture().as_deref(), weights.n_bytes), (Some("toy"), 16));
//! let missing: Result<GgufFile, GgufError> = GgufFile::open(folder.path().join("none"));
//! assert!(missing.is_err());
//! # Ok(())
//! # }
//! ```

mod partial;
mod read;
mod value;
mod write;

use std::{io, path::PathBuf};

use super::error::LlamaError;

pub(super) use read::c_path;
pub use read::{GgufFile, TensorInfo};
pub use value::{Array, TensorType, Value};
pub use write::{GgufWriter, Sink};

/// Why a GGUF file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The file is not there, not GGUF, damaged or cut.
    #[error(transparent)]
    Unreadable(#[from] LlamaError),
    /// The file exists, and was not to be replaced.
    #[error("{} exists; choose another output", .0.display())]
    Exists(PathBuf),
    /// The file is being written.
    #[error("cannot write {}: another writer is at it; let that end or choose another output", .0.display())]
    Busy(PathBuf),
    /// A key, value or tensor that the format cannot hold.
    #[error("cannot write a GGUF file with {0}")]
    Unwritable(String),
}

impl GgufError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
