//! What can go wrong between Rust and llama.cpp, in one sentence each.
//!
//! Never loses llama.cpp's own code or reason.

use std::{path::PathBuf, time::Duration};

/// A model, context, sequence or device that could not be used as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LlamaError {
    /// The path names nothing.
    #[error("no model file at {}: check the path given with -m", path.display())]
    NotFound {
        /// The path as given.
        path: PathBuf,
    },
    /// The path names a folder or a device.
    #[error("{} is not a file: give the path of a .gguf file", path.display())]
    NotAFile {
        /// The path as given.
        path: PathBuf,
    },
    /// The operating system refused to read the file.
    #[error("cannot read {}: {reason}", path.display())]
    Unreadable {
        /// The path as given.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// The file does not begin as a GGUF file does.
    #[error("{} is not a GGUF file: it begins with {found} instead of \"GGUF\"", path.display())]
    NotGguf {
        /// The path as given.
        path: PathBuf,
        /// The first bytes, escaped; "nothing" for an empty file.
        found: String,
    },
    /// The header ends early or contradicts itself.
    #[error("the GGUF header of {} is cut off or damaged ({reason}): fetch the file again", path.display())]
    BadHeader {
        /// The path as given.
        path: PathBuf,
        /// ggml's reason.
        reason: String,
    },
    /// The file is shorter than its tensor table says.
    #[error("{} is truncated: its tensors end at byte {need}, the file at byte {have}; fetch it again", path.display())]
    Truncated {
        /// The path as given.
        path: PathBuf,
        /// Bytes the tensor table needs.
        need: u64,
        /// Bytes the file has.
        have: u64,
    },
    /// A key every model has is missing.
    #[error("{} names no model architecture (general.architecture): it is not a language model", path.display())]
    NoArchitecture {
        /// The path as given.
        path: PathBuf,
    },
    /// The header holds what llama.cpp would end the process over.
    #[error("the GGUF header of {} is damaged: {reason}; fetch the file again", path.display())]
    Inconsistent {
        /// The path as given.
        path: PathBuf,
        /// What contradicts what.
        reason: String,
    },
    /// A path, template or message with a NUL byte, which C strings cannot hold.
    #[error("{what} contains a NUL byte")]
    Nul {
        /// What held the byte.
        what: &'static str,
    },
    /// llama.cpp refused the model.
    #[error("llama.cpp cannot load {}: {reason}", path.display())]
    Load {
        /// The path as given.
        path: PathBuf,
        /// llama.cpp's last error lines, or the exception.
        reason: String,
    },
    /// No device has this name or index.
    #[error("no device {spec:?}: this build and machine have {known}")]
    UnknownDevice {
        /// The device as given.
        spec: String,
        /// Names of the devices there are.
        known: String,
    },
    /// A build that loads ggml's backends found none for the CPU, without which nothing can be computed.
    #[error(
        "no library of ggml that computes on this CPU (libggml-cpu*.so) is in {places}: copy those of the build there, or \
         name their folder with GGML_BACKEND_DIR"
    )]
    NoCpu {
        /// The folders that were looked in.
        places: String,
    },
    /// The build has no RPC backend.
    #[error("this build has no RPC backend: build with GGML_RPC=ON in the environment")]
    NoRpc,
    /// An RPC server could not be reached or started.
    #[error("RPC endpoint {endpoint}: {reason}")]
    Rpc {
        /// `host:port` as given.
        endpoint: String,
        /// What failed.
        reason: String,
    },
    /// An RPC server took the connection and said nothing.
    #[error(
        "RPC endpoint {endpoint}: the server did not answer within {:.1} s; it has another client, or is no \
         `eldr rpc-server`: give each eldr a server of its own", deadline.as_secs_f64()
    )]
    RpcSilent {
        /// `host:port` as given.
        endpoint: String,
        /// How long it was waited for.
        deadline: Duration,
    },
    /// A context setting that cannot work.
    #[error("context {name}: {reason}")]
    ContextSetting {
        /// The context's name.
        name: String,
        /// What is wrong and what to give instead.
        reason: String,
    },
    /// The context's memory could not be had.
    #[error(
        "out of memory for context {name}: its keys and values need {mib} MiB ({n_slots} slots of {n_ctx_slot} tokens) \
         on {device}; use fewer slots, shorter slots or a smaller KV type"
    )]
    OutOfMemory {
        /// The context's name.
        name: String,
        /// Size of the KV cache, in MiB.
        mib: u64,
        /// Slots asked for.
        n_slots: u32,
        /// Tokens a slot.
        n_ctx_slot: u32,
        /// The device's name.
        device: String,
    },
    /// llama.cpp refused to create the context.
    #[error("llama.cpp cannot create context {name}: {reason}")]
    Context {
        /// The context's name.
        name: String,
        /// llama.cpp's last error lines, or the exception.
        reason: String,
    },
    /// A batch that is full.
    #[error("the batch is full: it holds {capacity} tokens")]
    BatchFull {
        /// Tokens it holds at most.
        capacity: usize,
    },
    /// A number that llama.cpp would index memory with is out of range.
    #[error("{what} {value} is out of range: it must be below {limit}")]
    OutOfRange {
        /// What the number is.
        what: &'static str,
        /// The number.
        value: i64,
        /// The first number that is too large.
        limit: i64,
    },
    /// Text llama.cpp could not tokenise or render.
    #[error("cannot turn {what} into tokens or text: {reason}")]
    Vocab {
        /// What was converted.
        what: &'static str,
        /// llama.cpp's reason.
        reason: String,
    },
    /// A chat template llama.cpp does not know.
    #[error("the model's chat template is not one that llama.cpp has built in: pass the prompt as plain text")]
    ChatTemplate,
    /// A sequence's state could not be read.
    #[error("cannot read the state of sequence {seq}: {reason}")]
    StateGet {
        /// The sequence.
        seq: u32,
        /// llama.cpp's reason.
        reason: String,
    },
    /// A sequence's state was not taken; the sequence is empty now.
    #[error("context {name} refused a sequence state of {n_tokens} tokens: {reason}")]
    StateSet {
        /// The context's name.
        name: String,
        /// Tokens the state should hold.
        n_tokens: u32,
        /// llama.cpp's reason, or what differs.
        reason: String,
    },
    /// Part of a sequence cannot be dropped or copied in this model or context.
    #[error("sequence {seq}: {reason}")]
    Sequence {
        /// The sequence.
        seq: u32,
        /// What cannot be done.
        reason: String,
    },
    /// Sampling settings that cannot work, or a sampler that failed.
    #[error("sampling: {reason}")]
    Sampling {
        /// What is wrong.
        reason: String,
    },
}

/// Why a batch did not run, or ran without its picks being counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeFailure {
    /// No room in the KV cache (`llama_decode` returned 1).
    NoSlot,
    /// The cancel flag was set (2); ubatches before it remain in memory.
    Aborted,
    /// The batch contradicts itself or the memory (-1).
    InvalidBatch,
    /// The computation failed (below -1); ubatches before it remain in memory.
    Fatal,
    /// A C++ exception; what remains in memory is unknown.
    Exception,
    /// The batch ran and its logits are good, but the tap's rows cannot be trusted and none were handed out.
    Tap,
}

/// A batch that did not run as asked, and what is left of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct DecodeError {
    /// What kind of failure.
    pub failure: DecodeFailure,
    /// `llama_decode`'s return value (llama.h); 0 for [`DecodeFailure::Tap`] and for batches refused before the call.
    pub code: i32,
    /// The memory is as it was before the call: the batch may be tried again.
    pub restored: bool,
    /// What happened, in one sentence, with llama.cpp's own reason.
    pub message: String,
}

impl DecodeError {
    pub(super) fn refused(message: String) -> Self {
        Self { failure: DecodeFailure::InvalidBatch, code: 0, restored: true, message }
    }

    pub(super) fn tap(message: String) -> Self {
        Self { failure: DecodeFailure::Tap, code: 0, restored: false, message }
    }

    pub(super) fn exception(message: String) -> Self {
        Self { failure: DecodeFailure::Exception, code: 0, restored: false, message }
    }

    /// The failure a non-zero return value of `llama_decode` stands for (llama.h, `llama_decode`).
    pub(super) fn from_code(code: i32, n_tokens: usize, reason: &str) -> Self {
        let (failure, restored, what) = match code {
            1 => (DecodeFailure::NoSlot, true, "no room in the KV cache"),
            2 => (DecodeFailure::Aborted, false, "cancelled"),
            -1 => (DecodeFailure::InvalidBatch, true, "invalid batch"),
            _ => (DecodeFailure::Fatal, false, "computation failed"),
        };
        let tail = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        let message = format!("{what} for a batch of {n_tokens} tokens (llama_decode returned {code}){tail}");
        Self { failure, code, restored, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn return_codes_say_whether_memory_was_restored() {
        let restored = [1, -1, 2, -2, -3].map(|code| DecodeError::from_code(code, 4, "").restored);
        assert_eq!(restored, [true, true, false, false, false]);
        let error = DecodeError::from_code(1, 4, "cache is full");
        assert_eq!(
            error.to_string(),
            "no room in the KV cache for a batch of 4 tokens (llama_decode returned 1): cache is full"
        );
    }
}
