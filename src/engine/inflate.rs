//! How a small model becomes one with large experts: the same outputs and picks, as many bytes as wanted.
//!
//! Never loads a model, never changes its input, and never leaves a half-written output under the final name.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use super::{OutputError, check_output};
use crate::llama::{
    Backend, INFLATED_OF, LlamaError, fingerprint,
    gguf_file::{GgufError, GgufFile, GgufWriter, Sink, TensorInfo},
};

/// How large the experts become.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum InflateTarget {
    /// The hidden dimension of every expert is multiplied by at least this.
    Factor(f64),
    /// The smallest experts with which the file has at least this many bytes.
    Bytes(u64),
}

/// What was made of what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InflateReport {
    /// Hidden dimension of an expert before and after.
    pub n_ff: (u64, u64),
    /// Bytes of the file before and after.
    pub n_bytes: (u64, u64),
    /// Tensors that grew; all others were copied.
    pub n_grown: usize,
}

/// Why a model cannot be inflated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InflateError {
    /// The input cannot be read or the output cannot be written.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The input's header contradicts itself.
    #[error(transparent)]
    Model(#[from] LlamaError),
    /// No experts.
    #[error("{} is a dense model: it has no experts to inflate; choose a mixture-of-experts model", .0.display())]
    Dense(PathBuf),
    /// One part of a model.
    #[error("{} is one part of a split model; merge the parts with llama-gguf-split --merge first", .0.display())]
    Split(PathBuf),
    /// The output is the input, no regular file, or can not be made.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The output exists.
    #[error("{} exists; choose another output or use --force to replace it", .0.display())]
    Exists(PathBuf),
    /// More bytes than are free.
    #[error("cannot write {}: it would have {need} bytes and {free} are free there; ask for less or choose another disk", path.display())]
    NoRoom {
        /// The output.
        path: PathBuf,
        /// Bytes it would have.
        need: u64,
        /// Bytes free in its folder.
        free: u64,
    },
    /// An architecture whose use of the expert width was not checked.
    #[error("inflating the architecture {0} is not supported; these are: {list}", list = names())]
    Architecture(String),
    /// Experts that are not laid out as their architecture says.
    #[error("cannot inflate the tensor {tensor}: {reason}")]
    Tensor {
        /// Its name.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A target that asks for nothing or for the impossible.
    #[error("cannot inflate to {0}")]
    Target(String),
}

/// The metadata key that holds an architecture's expert width.
#[derive(Clone, Copy, PartialEq)]
enum WidthKey {
    /// `expert_feed_forward_length`.
    Expert,
    /// `feed_forward_length`.
    FeedForward,
}

/// What the width of an architecture's shared experts depends on.
#[derive(Clone, Copy, PartialEq)]
enum Shared {
    /// A key of its own, or there are none: they are copied.
    Own,
    /// The expert width: they grow with it.
    Expert,
}

/// How each architecture uses the expert width, read in llama.cpp's src/models at the pinned version.
const ARCHITECTURES: [(&str, WidthKey, Shared); 21] = [
    ("afmoe", WidthKey::Expert, Shared::Expert),
    ("bailingmoe", WidthKey::Expert, Shared::Expert),
    ("dbrx", WidthKey::FeedForward, Shared::Own),
    ("deepseek", WidthKey::Expert, Shared::Expert),
    ("deepseek2", WidthKey::Expert, Shared::Expert),
    ("dots1", WidthKey::Expert, Shared::Expert),
    ("gemma4", WidthKey::Expert, Shared::Own),
    ("glm4moe", WidthKey::Expert, Shared::Expert),
    ("gpt-oss", WidthKey::Expert, Shared::Own),
    ("granitemoe", WidthKey::FeedForward, Shared::Own),
    ("llada-moe", WidthKey::Expert, Shared::Own),
    ("llama", WidthKey::FeedForward, Shared::Own),
    ("olmoe", WidthKey::FeedForward, Shared::Own),
    ("phimoe", WidthKey::FeedForward, Shared::Own),
    ("qwen2moe", WidthKey::Expert, Shared::Own),
    ("qwen35moe", WidthKey::Expert, Shared::Own),
    ("qwen3moe", WidthKey::Expert, Shared::Own),
    ("qwen3next", WidthKey::Expert, Shared::Own),
    ("qwen3vlmoe", WidthKey::Expert, Shared::Own),
    ("rnd1", WidthKey::Expert, Shared::Own),
    ("smallthinker", WidthKey::Expert, Shared::Own),
];

/// Widths stay multiples of this, so that llama.cpp's kernels have no scalar remainder and sum in the same order.
const WIDTH_STEP: u64 = 32;

fn names() -> String {
    ARCHITECTURES.map(|(name, ..)| name).join(", ")
}

/// Writes `output`: the model `input` with zero rows added to every expert's hidden dimension.
///
/// A zero row of the gate and up projections and a zero column of the down projection add zero to every output, so
/// outputs and picks stay what they were, to the bit on CPU (shared experts grow too where llama.cpp ties their width
/// to the experts'). `progress` is told bytes written and bytes to write. An existing `output` is replaced with `force`;
/// without it, one that comes to be in the meantime is not either. What killed writers of `output` left is removed.
pub fn inflate(
    input: &Path,
    output: &Path,
    target: InflateTarget,
    force: bool,
    mut progress: impl FnMut(u64, u64),
) -> Result<InflateReport, InflateError> {
    // ggml prints what it finds wrong in a file unless its log is taken first.
    Backend::init();
    let target_file = check_output(output, &[input])?;
    if target_file.exists() && !force {
        return Err(InflateError::Exists(output.to_owned()));
    }
    GgufWriter::sweep(&target_file);
    let file = GgufFile::open(input)?;
    let experts = Experts::find(&file)?;
    let n_ff = experts.choose_width(&file, target)?;
    let writer = experts.plan(&file, n_ff)?;
    let total = writer.n_bytes();
    check_room(output, &target_file, total)?;
    let mut done = 0;
    let mut put = |name: &str, sink: &mut Sink<'_>| -> Result<(), GgufError> {
        let tensor = file.tensor(name).expect("added from this file");
        experts.put(&file, tensor, n_ff, sink)?;
        done += experts.grown_bytes(tensor, n_ff);
        progress(done, total);
        Ok(())
    };
    let written = if force { writer.write(&target_file, &mut put) } else { writer.write_new(&target_file, &mut put) };
    let n_bytes = written.map_err(|error| match error {
        GgufError::Exists(_) => InflateError::Exists(output.to_owned()),
        error => error.into(),
    })?;
    Ok(InflateReport { n_ff: (experts.n_ff, n_ff), n_bytes: (file.n_bytes(), n_bytes), n_grown: experts.grown.len() })
}

/// Refuses what the disk has no room for, as far as that can be told. A file that will be replaced is there until then.
fn check_room(output: &Path, target: &Path, need: u64) -> Result<(), InflateError> {
    #[cfg(unix)]
    {
        let Some(found) = target.parent().and_then(|folder| rustix::fs::statvfs(folder).ok()) else { return Ok(()) };
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        // A file system that does not count its blocks says that there are none.
        if found.f_blocks > 0 && need > free {
            return Err(InflateError::NoRoom { path: output.to_owned(), need, free });
        }
    }
    #[cfg(not(unix))]
    let _ = (output, target, need);
    Ok(())
}

/// The file that [`inflate`] writes before it becomes `output`; a program that ends in between has to remove it.
pub fn inflate_partial(output: &Path) -> Result<PathBuf, InflateError> {
    Ok(GgufWriter::partial(&check_output(output, &[])?)?)
}

/// The tensors that have the expert width, and where in them it is.
struct Experts {
    /// Of the model: what was calibrated for it fits its inflated copies.
    fingerprint: String,
    n_ff: u64,
    /// New widths are multiples of this.
    step: u64,
    width_key: String,
    grown: Vec<Grown>,
}

/// A tensor that has the expert width along an axis, `parts` times over if gate and up lie behind each other.
struct Grown {
    name: String,
    axis: usize,
    parts: u64,
    /// Length of one part along the axis: the expert width, or a multiple in shared experts.
    len: u64,
}

impl Experts {
    fn find(file: &GgufFile) -> Result<Self, InflateError> {
        let number = |key: &str| file.value(key).and_then(|v| v.as_u64());
        if number("split.count").is_some_and(|n| n > 1) {
            return Err(InflateError::Split(file.path().to_owned()));
        }
        let arch = file.architecture().unwrap_or_default();
        if number(&format!("{arch}.expert_count")).unwrap_or(0) == 0 {
            return Err(InflateError::Dense(file.path().to_owned()));
        }
        let Some(&(_, key, shared)) = ARCHITECTURES.iter().find(|(name, ..)| *name == arch) else {
            return Err(InflateError::Architecture(arch));
        };
        let width_key = match key {
            WidthKey::Expert => format!("{arch}.expert_feed_forward_length"),
            WidthKey::FeedForward => format!("{arch}.feed_forward_length"),
        };
        let mut grown = Vec::new();
        let mut n_ff = None;
        for tensor in file.tensors() {
            let Some((axis, parts, is_shared)) = layout(&tensor.name) else { continue };
            if is_shared && shared == Shared::Own {
                continue;
            }
            let len = tensor.shape[axis] / parts;
            if !is_shared {
                n_ff.get_or_insert(len);
            }
            grown.push(Grown { name: tensor.name.clone(), axis, parts, len });
        }
        let Some(n_ff) = n_ff else { return Err(InflateError::Dense(file.path().to_owned())) };
        let mut step = WIDTH_STEP;
        for grown in &grown {
            let tensor = file.tensor(&grown.name).expect("found above");
            let refuse = |reason: String| Err(InflateError::Tensor { tensor: tensor.name.clone(), reason });
            let exact = tensor.shape[grown.axis] == grown.len * grown.parts && grown.len.is_multiple_of(n_ff);
            let is_shared = tensor.name.contains("shexp");
            if !exact || (!is_shared && grown.len != n_ff) {
                return refuse(format!("it has shape {:?}, which is no expert width of {n_ff}", tensor.shape));
            }
            if !tensor.ttype.zero_bytes_are_zeros() {
                return refuse(format!("zero bytes are not zero weights in its type {}", tensor.ttype.name()));
            }
            if grown.axis == 0 {
                // Block lengths are powers of two, so the largest is a multiple of all.
                step = step.max(tensor.ttype.block_len());
            }
        }
        match file.value(&width_key) {
            Some(value) if value.as_u64() != Some(n_ff) => {
                let reason =
                    format!("the file says {width_key} is {value:?}; layers of different widths are not supported");
                return Err(InflateError::Tensor { tensor: grown[0].name.clone(), reason });
            }
            _ => {}
        }
        Ok(Self { fingerprint: fingerprint(file.path())?, n_ff, step, width_key, grown })
    }

    /// The new expert width: a multiple of the step, or the old one.
    fn choose_width(&self, file: &GgufFile, target: InflateTarget) -> Result<u64, InflateError> {
        let steps_up = |n_ff: u64| if n_ff <= self.n_ff { self.n_ff } else { n_ff.next_multiple_of(self.step) };
        match target {
            InflateTarget::Factor(factor) => {
                let most = u64::from(u32::MAX) / self.step * self.step / self.n_ff;
                let bound = match factor {
                    factor if factor > most as f64 => {
                        format!("at most {most} here, since llama.cpp holds the width in 32 bits")
                    }
                    factor if factor >= 1.0 => return Ok(steps_up((self.n_ff as f64 * factor).ceil() as u64)),
                    _ => "at least 1".to_owned(),
                };
                Err(InflateError::Target(format!("{factor} times the width; a factor is {bound}")))
            }
            InflateTarget::Bytes(bytes) if bytes < file.n_bytes() => Err(InflateError::Target(format!(
                "{bytes} bytes: the model has {} already; ask for more",
                file.n_bytes()
            ))),
            InflateTarget::Bytes(bytes) => {
                let step_bytes: u64 = file.tensors().iter().map(|t| self.added_bytes(t, self.n_ff + self.step)).sum();
                let missing = bytes.saturating_sub(file.n_bytes());
                // One step low, because padding and metadata change the size a little; then up to the target.
                let mut n_ff = steps_up(self.n_ff + (missing / step_bytes).saturating_sub(1) * self.step);
                while self.plan(file, n_ff)?.n_bytes() < bytes {
                    n_ff = steps_up(n_ff + 1);
                }
                Ok(n_ff)
            }
        }
    }

    /// The output's metadata and tensor table.
    fn plan(&self, file: &GgufFile, n_ff: u64) -> Result<GgufWriter, InflateError> {
        let width = u32::try_from(n_ff)
            .map_err(|_| InflateError::Target(format!("a width of {n_ff}: llama.cpp holds it in 32 bits")))?;
        let mut writer = GgufWriter::new();
        writer.copy_metadata(file);
        writer.set(&self.width_key, width)?;
        writer.set(INFLATED_OF, self.fingerprint.as_str())?;
        for tensor in file.tensors() {
            writer.add_tensor(&tensor.name, tensor.ttype, &self.grown_shape(tensor, n_ff))?;
        }
        Ok(writer)
    }

    fn find_grown(&self, tensor: &TensorInfo) -> Option<&Grown> {
        self.grown.iter().find(|g| g.name == tensor.name)
    }

    fn grown_shape(&self, tensor: &TensorInfo, n_ff: u64) -> [u64; 4] {
        let mut shape = tensor.shape;
        if let Some(grown) = self.find_grown(tensor) {
            shape[grown.axis] = grown.len / self.n_ff * n_ff * grown.parts;
        }
        shape
    }

    fn grown_bytes(&self, tensor: &TensorInfo, n_ff: u64) -> u64 {
        let [row, rest @ ..] = self.grown_shape(tensor, n_ff);
        tensor.ttype.row_bytes(row) * rest.iter().product::<u64>()
    }

    fn added_bytes(&self, tensor: &TensorInfo, n_ff: u64) -> u64 {
        self.grown_bytes(tensor, n_ff) - tensor.n_bytes
    }

    /// Puts the data of `tensor`: each stretch of it that spans the expert width, followed by the zeros that widen it.
    fn put(&self, file: &GgufFile, tensor: &TensorInfo, n_ff: u64, sink: &mut Sink) -> Result<(), GgufError> {
        let (keep, n_stretches) = match self.find_grown(tensor) {
            None => (tensor.n_bytes, 1),
            Some(grown) => {
                let above: u64 = tensor.shape[grown.axis + 1..].iter().product();
                (tensor.n_bytes / (above * grown.parts), above * grown.parts)
            }
        };
        let zeros = self.added_bytes(tensor, n_ff) / n_stretches;
        let mut data = std::io::BufReader::with_capacity(1 << 20, file.data(tensor)?);
        let mut chunk = vec![0; keep.min(1 << 20) as usize];
        for _ in 0..n_stretches {
            let mut left = keep;
            while left > 0 {
                let n = left.min(chunk.len() as u64) as usize;
                data.read_exact(&mut chunk[..n]).map_err(GgufError::io("read", file.path()))?;
                sink.put(&chunk[..n])?;
                left -= n as u64;
            }
            sink.put_zeros(zeros)?;
        }
        Ok(())
    }
}

/// Where a layer's tensor has the expert width: the axis, how many parts lie behind each other along it, and whether it
/// is of a shared expert.
fn layout(name: &str) -> Option<(usize, u64, bool)> {
    let (number, part) = name.strip_prefix("blk.")?.split_once('.')?;
    number.parse::<u32>().ok()?;
    Some(match part {
        "ffn_gate_exps.weight" | "ffn_up_exps.weight" => (1, 1, false),
        "ffn_gate_up_exps.weight" => (1, 2, false),
        "ffn_down_exps.weight" | "ffn_gate_exps.bias" | "ffn_up_exps.bias" => (0, 1, false),
        "ffn_gate_up_exps.bias" => (0, 2, false),
        "ffn_gate_shexp.weight" | "ffn_up_shexp.weight" => (1, 1, true),
        "ffn_down_shexp.weight" => (0, 1, true),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_listed_once_in_order() {
        assert!(ARCHITECTURES.windows(2).all(|w| w[0].0 < w[1].0));
    }

    #[test]
    fn only_tensors_with_the_expert_width_grow() {
        assert_eq!(layout("blk.12.ffn_gate_up_exps.weight"), Some((1, 2, false)));
        assert_eq!(layout("blk.0.ffn_down_exps.weight"), Some((0, 1, false)));
        assert_eq!(layout("blk.0.ffn_down_exps.bias"), None);
        assert_eq!(layout("blk.0.ffn_down_exps.scale"), None);
        assert_eq!(layout("blk.0.ffn_gate_inp.weight"), None);
        assert_eq!(layout("ffn_down_exps.weight"), None);
    }
}
