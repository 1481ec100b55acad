//! A loaded model: its weights on a device, and what is known about them.
//!
//! Never computes; a [`Context`](super::Context) does.

use std::{
    ffi::CString,
    fmt,
    path::{Path, PathBuf},
    ptr::{self, NonNull},
    sync::{Arc, Mutex},
};

use llama_cpp_sys_2 as sys;

use crate::types::MoeShape;

use super::{
    backend::Backend,
    device::{self, Device},
    error::LlamaError,
    facts::{self, KvWidth, ModelFacts},
    gguf::{Header, INFLATED_OF},
    gguf_file, guard, logging,
    params::KvType,
    spread::Spread,
};

/// Which layers keep their experts in host memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CpuMoe {
    /// None: experts are where their layer is.
    #[default]
    None,
    /// All layers (`--cpu-moe`).
    All,
    /// The first so many layers (`--n-cpu-moe`); as many as there are or more are all.
    First(u32),
}

/// How a model is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelParams {
    /// The device; `None` takes [`Backend::best_device`].
    pub device: Option<Device>,
    /// Devices that take the layers after its own, each with the keys and values of its layers; none of them the CPU.
    pub beside: Vec<Device>,
    /// Shares of the layers, one for each device; empty divides them by free memory (`--tensor-split`).
    pub shares: Vec<u32>,
    /// Layers on the devices, counted from the last; `None` puts all there. Ignored on the CPU.
    pub n_gpu_layers: Option<u32>,
    /// Layers whose experts stay in host memory. Nothing changes on the CPU.
    pub cpu_moe: CpuMoe,
    /// Map the file instead of reading it: processes share its pages.
    pub use_mmap: bool,
    /// Let ggml repack weights or use AMX. Off, because some virtual machines report AMX and fault on it.
    pub extra_bufts: bool,
    /// Read only the header, and foresee what model and contexts take
    /// ([`Context::footprint`](super::Context::footprint)). Nothing can be computed with it.
    pub no_alloc: bool,
}

impl Default for ModelParams {
    fn default() -> Self {
        Self {
            device: None,
            beside: Vec::new(),
            shares: Vec::new(),
            n_gpu_layers: None,
            cpu_moe: CpuMoe::None,
            use_mmap: true,
            extra_bufts: false,
            no_alloc: false,
        }
    }
}

/// A model in memory. Cloning shares it; the last clone frees it.
#[derive(Clone)]
pub struct Model {
    inner: Arc<Inner>,
}

struct Inner {
    raw: NonNull<sys::llama_model>,
    vocab: NonNull<sys::llama_vocab>,
    /// Held while a context is created, the one call that takes the model mutably.
    creating: Mutex<()>,
    path: PathBuf,
    devices: Vec<Device>,
    header: Header,
    facts: ModelFacts,
    kv_width: KvWidth,
    no_alloc: bool,
    /// llama.cpp keeps pointers into it.
    _overrides: Overrides,
}

// SAFETY: after loading, llama.cpp only reads a model; the one exception, context creation, holds `creating`.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: every context owns a clone of the model, so none is left.
        unsafe { sys::llama_model_free(self.raw.as_ptr()) };
    }
}

impl Model {
    /// Loads the GGUF file at `path`, and the other parts of a split model beside it.
    ///
    /// The file is checked before llama.cpp sees it: it exists, is GGUF, is whole and names an architecture. Errors say
    /// which of these is wrong, or quote llama.cpp's reason.
    pub fn load(backend: &Backend, path: impl AsRef<Path>, params: &ModelParams) -> Result<Self, LlamaError> {
        let path = path.as_ref();
        let header = Header::read(path)?;
        let failed = |reason: String| LlamaError::Load { path: path.to_owned(), reason };
        let first = params.device.clone().map_or_else(|| backend.best_device(), Ok)?;
        let mut spread = Spread::new(first, params).map_err(failed)?;
        // Where it is missing, llama.cpp says so itself.
        let n_layer = header.number(&format!("{}.block_count", header.text("general.architecture"))).unwrap_or(0);
        let overrides = Overrides::new(params.cpu_moe, u32::try_from(n_layer).unwrap_or(u32::MAX));
        let raw = load(path, params, &mut spread, &overrides)?;
        if let Some(reason) = device::failure_of(&spread.devices) {
            // SAFETY: loaded just now, and used by nobody.
            unsafe { sys::llama_model_free(raw.as_ptr()) };
            return Err(failed(reason));
        }
        // SAFETY: the model is loaded.
        let vocab = unsafe { sys::llama_model_get_vocab(raw.as_ptr()) };
        let vocab = NonNull::new(vocab.cast_mut()).expect("a loaded model has a vocabulary");
        let facts = read_facts(raw, vocab, &header);
        let kv_width = facts::kv_width(&header, facts.n_layer);
        let inner = Inner {
            raw,
            vocab,
            creating: Mutex::new(()),
            path: path.to_owned(),
            devices: spread.devices,
            header,
            facts,
            kv_width,
            no_alloc: params.no_alloc,
            _overrides: overrides,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Size, shape and identity.
    pub fn facts(&self) -> &ModelFacts {
        &self.inner.facts
    }

    /// Layers, experts and picks; `None` for a dense model.
    pub fn moe_shape(&self) -> Option<&MoeShape> {
        self.inner.facts.moe.as_ref()
    }

    /// Equal for models that compute the same: see [`ModelFacts::fingerprint`].
    pub fn fingerprint(&self) -> &str {
        &self.inner.facts.fingerprint
    }

    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The device it was loaded on; the first of several.
    pub fn device(&self) -> &Device {
        &self.inner.devices[0]
    }

    /// The devices it was loaded on, at least one, in the order of their layers.
    pub fn devices(&self) -> &[Device] {
        &self.inner.devices
    }

    /// The names of its devices, with a `+` between.
    pub fn place(&self) -> String {
        self.devices().iter().map(Device::name).collect::<Vec<_>>().join("+")
    }

    /// Why nothing computed with it can be used any more: one of its devices has failed ([`Device::failure`]).
    pub fn failure(&self) -> Option<String> {
        device::failure_of(self.devices())
    }

    /// The GGUF metadata, by key; arrays by kind and length only.
    pub fn metadata(&self) -> Vec<(String, String)> {
        self.inner.header.values.iter().map(|(key, value)| (key.clone(), value.to_string())).collect()
    }

    /// Whether zero rows were added to its experts: same outputs and picks, larger weights.
    pub fn is_inflated(&self) -> bool {
        self.inner.header.values.contains_key(INFLATED_OF)
    }

    /// Bytes of keys and values a token keeps, an upper bound for sliding windows and recurrent layers.
    pub fn kv_bytes_per_token(&self, type_k: KvType, type_v: KvType) -> u64 {
        let width = self.inner.kv_width;
        type_k.bytes(width.keys) + type_v.bytes(width.values)
    }

    /// Whether it takes no memory, and computes nothing.
    pub(super) fn is_foreseen(&self) -> bool {
        self.inner.no_alloc
    }

    pub(super) fn header(&self) -> &Header {
        &self.inner.header
    }

    pub(super) fn vocab(&self) -> *const sys::llama_vocab {
        self.inner.vocab.as_ptr()
    }

    /// Creates a context. `Ok(None)` when llama.cpp refused.
    pub(super) fn create_context(
        &self,
        params: &sys::llama_context_params,
    ) -> Result<Option<NonNull<sys::llama_context>>, guard::Caught> {
        let _lock = self.inner.creating.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut out = ptr::null_mut();
        // SAFETY: the model is loaded, `creating` is held, and what the parameters point to is the caller's.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_context_init(self.inner.raw.as_ptr(), params, &raw mut out, message, size)
        })?;
        Ok(NonNull::new(out))
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Model({}, {}, {:?})", self.inner.path.display(), self.inner.facts.desc, self.inner.devices)
    }
}

/// Places for tensors that do not go where their layer goes, and the patterns that name them.
struct Overrides {
    entries: Vec<sys::llama_model_tensor_buft_override>,
    _patterns: Vec<CString>,
}

const EXPERTS: &str = r"ffn_(up|down|gate|gate_up)_(ch|)exps";

impl Overrides {
    /// For a model of `n_layer` layers, all kinds together.
    fn new(cpu_moe: CpuMoe, n_layer: u32) -> Self {
        let patterns: Vec<String> = match cpu_moe {
            CpuMoe::None => Vec::new(),
            CpuMoe::All => vec![format!(r"\.{EXPERTS}")],
            CpuMoe::First(n) => (0..n.min(n_layer)).map(|layer| format!(r"blk\.{layer}\.{EXPERTS}")).collect(),
        };
        let patterns: Vec<CString> =
            patterns.into_iter().map(|p| CString::new(p).expect("a pattern without NUL")).collect();
        // SAFETY: no precondition; a static of ggml.
        let cpu = unsafe { guard::eldr_guard_host_buffers() };
        let mut entries: Vec<_> = patterns
            .iter()
            .map(|pattern| sys::llama_model_tensor_buft_override { pattern: pattern.as_ptr(), buft: cpu })
            .collect();
        if !entries.is_empty() {
            entries.push(sys::llama_model_tensor_buft_override { pattern: ptr::null(), buft: ptr::null_mut() });
        }
        Self { entries, _patterns: patterns }
    }

    fn as_ptr(&self) -> *const sys::llama_model_tensor_buft_override {
        if self.entries.is_empty() { ptr::null() } else { self.entries.as_ptr() }
    }
}

fn load(
    path: &Path,
    params: &ModelParams,
    spread: &mut Spread,
    overrides: &Overrides,
) -> Result<NonNull<sys::llama_model>, LlamaError> {
    let c_path = gguf_file::c_path(path)?;
    // SAFETY: no precondition.
    let mut raw_params = unsafe { sys::llama_model_default_params() };
    spread.tell(&mut raw_params);
    raw_params.n_gpu_layers = match params.n_gpu_layers {
        _ if spread.is_host() => 0,
        None => -1,
        Some(n) => i32::try_from(n).unwrap_or(i32::MAX),
    };
    raw_params.no_alloc = params.no_alloc;
    raw_params.load_mode =
        if params.use_mmap && !params.no_alloc { sys::LLAMA_LOAD_MODE_MMAP } else { sys::LLAMA_LOAD_MODE_NONE };
    raw_params.use_extra_bufts = params.extra_bufts;
    raw_params.tensor_buft_overrides = overrides.as_ptr();
    let failed = |reason: String| LlamaError::Load { path: path.to_owned(), reason };
    let mut out = ptr::null_mut();
    logging::clear_errors();
    // SAFETY: the path is a C string; devices and shares live for the call and the overrides as long as the model.
    guard::call(|message, size| unsafe {
        guard::eldr_guard_model_load(c_path.as_ptr(), &raw const raw_params, &raw mut out, message, size)
    })
    .map_err(|e| failed(e.to_string()))?;
    NonNull::new(out).ok_or_else(|| failed(logging::take_reason()))
}

fn read_facts(raw: NonNull<sys::llama_model>, vocab: NonNull<sys::llama_vocab>, header: &Header) -> ModelFacts {
    let model = raw.as_ptr();
    let count = |n: i32| u32::try_from(n).unwrap_or(0);
    // SAFETY: the model is loaded.
    let n_layer = count(unsafe { sys::llama_model_n_layer(model) });
    let moe = facts::moe_shape(header, n_layer);
    let mut desc = [0; 256];
    // SAFETY: llama.cpp writes at most the given size, terminated.
    unsafe { sys::llama_model_desc(model, desc.as_mut_ptr(), desc.len()) };
    ModelFacts {
        arch: header.text("general.architecture").to_owned(),
        // SAFETY: written just above.
        desc: unsafe { guard::text(desc.as_ptr()) },
        n_layer,
        // SAFETY: the model is loaded.
        n_embd: count(unsafe { sys::llama_model_n_embd(model) }),
        // SAFETY: the model is loaded.
        n_head_kv: count(unsafe { sys::llama_model_n_head_kv(model) }),
        // SAFETY: the model is loaded.
        n_ctx_train: count(unsafe { sys::llama_model_n_ctx_train(model) }),
        // SAFETY: the vocabulary is the model's.
        n_vocab: count(unsafe { sys::llama_vocab_n_tokens(vocab.as_ptr()) }),
        // SAFETY: the model is loaded.
        n_params: unsafe { sys::llama_model_n_params(model) },
        // SAFETY: the model is loaded.
        size_bytes: unsafe { sys::llama_model_size(model) },
        // SAFETY: the model is loaded.
        n_swa: count(unsafe { sys::llama_model_n_swa(model) }),
        // SAFETY: the model is loaded.
        recurrent: unsafe { sys::llama_model_is_recurrent(model) },
        // SAFETY: the model is loaded.
        hybrid: unsafe { sys::llama_model_is_hybrid(model) },
        experts: moe.as_ref().map(|shape| facts::expert_bytes(header, shape)),
        moe,
        fingerprint: header.digest.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::llama::testing::{self, model};

    fn error(path: &Path) -> LlamaError {
        Model::load(&Backend::init(), path, &ModelParams::default()).expect_err("refused")
    }

    #[test]
    fn the_shipped_model_is_known() {
        let facts = model().facts();
        let shape = MoeShape { layers: (0..6).collect(), n_layer: 6, n_expert: 64, n_expert_used: 4 };
        assert_eq!(facts.moe.as_ref(), Some(&shape));
        assert_eq!((facts.arch.as_str(), facts.n_embd, facts.n_head_kv, facts.n_ctx_train), ("qwen3moe", 256, 2, 1024));
        assert_eq!((facts.n_vocab, facts.n_swa, facts.recurrent, facts.hybrid), (4096, 0, false, false));
        // 2 heads of 64 in each of 6 layers, 2 bytes each, keys and values.
        assert_eq!(model().kv_bytes_per_token(KvType::F16, KvType::F16), 2 * 64 * 6 * 2 * 2);
        // Three matrices of 256 x 64 in Q8_0.
        assert_eq!(facts.experts.expect("experts").expert, 3 * 256 * 64 * 34 / 32);
        let sum = facts.experts.map(|e| e.all_experts + e.dense);
        assert_eq!(sum, Some(facts.size_bytes));
        assert!(model().metadata().contains(&("qwen3moe.expert_count".to_owned(), "64".to_owned())));
    }

    #[test]
    fn the_fingerprint_is_the_files_and_not_the_loads() {
        let params = ModelParams { use_mmap: false, device: Some(model().device().clone()), ..ModelParams::default() };
        let again = Model::load(&Backend::init(), testing::path(), &params).expect("loads again");
        assert_eq!(again.fingerprint(), model().fingerprint());
        assert_eq!(again.fingerprint().len(), 64);
    }

    #[test]
    fn files_that_are_not_models_are_told_apart() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            fs::write(&path, bytes).expect("written");
            path
        };
        assert!(matches!(error(&folder.path().join("none.gguf")), LlamaError::NotFound { .. }));
        assert!(matches!(error(folder.path()), LlamaError::NotAFile { .. }));
        let empty = error(&file("empty", b""));
        assert!(matches!(&empty, LlamaError::NotGguf { found, .. } if found == "nothing"), "{empty}");
        let text = error(&file("text", b"once upon a time"));
        assert!(matches!(&text, LlamaError::NotGguf { found, .. } if found == "\"once\""), "{text}");
        assert!(matches!(error(&file("magic", b"GGUF")), LlamaError::BadHeader { .. }));
        // Version 3, no tensors, no metadata.
        let bare = [&b"GGUF"[..], &3u32.to_le_bytes(), &[0; 16]].concat();
        assert!(matches!(error(&file("bare", &bare)), LlamaError::NoArchitecture { .. }));
        // A number of keys that no file could hold.
        let mut greedy = bare.clone();
        greedy[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(error(&file("greedy", &greedy)), LlamaError::BadHeader { .. }));
    }

    #[test]
    fn a_file_cut_anywhere_is_refused_with_a_reason() {
        let whole = fs::read(testing::path()).expect("the shipped model");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("cut.gguf");
        let mut cuts: Vec<usize> = (4..64).collect();
        cuts.extend((1..60).map(|i| i * whole.len() / 60));
        cuts.extend((0..40).map(|i| 1000 + 3989 * i));
        cuts.push(whole.len() - 1);
        for cut in cuts {
            fs::write(&path, &whole[..cut]).expect("written");
            match error(&path) {
                LlamaError::BadHeader { reason, .. } => assert_ne!(reason, "it gave no reason", "cut at {cut}"),
                LlamaError::Truncated { need, have, .. } => {
                    assert_eq!((need, have), (whole.len() as u64, cut as u64));
                }
                other => panic!("cut at {cut}: {other}"),
            }
        }
    }

    #[test]
    fn an_unknown_architecture_quotes_llama_cpp() {
        let mut bytes = fs::read(testing::path()).expect("the shipped model");
        let at = bytes.windows(8).position(|w| w == b"qwen3moe").expect("the architecture");
        bytes[at..at + 8].copy_from_slice(b"qwen3moo");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("odd.gguf");
        fs::write(&path, bytes).expect("written");
        let error = error(&path).to_string();
        assert!(error.contains("unknown model architecture") && error.contains("qwen3moo"), "{error}");
    }

    // Symptom: each of these files ended the process in an assert of llama.cpp.
    #[test]
    fn headers_llama_cpp_would_assert_on_are_refused() {
        let whole = fs::read(testing::path()).expect("the shipped model");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("damaged.gguf");
        let find = |bytes: &[u8], what: &[u8]| {
            bytes.windows(what.len()).position(|window| window == what).expect("in the header") + what.len()
        };

        let mut bytes = whole.clone();
        // A u32 follows the key and its type.
        let at = find(&bytes, b"qwen3moe.expert_used_count") + 4;
        bytes[at..at + 4].copy_from_slice(&65u32.to_le_bytes());
        fs::write(&path, bytes).expect("written");
        let text = error(&path).to_string();
        assert!(text.contains("expert_used_count is 65, but it must be 1 to 64"), "{text}");

        // Symptom: the first three aborted in ggml, the others ended in a sentence without the file's name.
        for (key, value, want) in [
            ("rope.dimension_count", 63u32.to_le_bytes(), "rope.dimension_count is 63, but it must be 64"),
            ("attention.layer_norm_rms_epsilon", f32::NAN.to_le_bytes(), "epsilon is NaN, but it must be 0 or more"),
            ("attention.layer_norm_rms_epsilon", (-1f32).to_le_bytes(), "epsilon is -1, but it must be 0 or more"),
            ("rope.freq_base", f32::NAN.to_le_bytes(), "rope.freq_base is NaN, but it must be more than 0"),
            ("context_length", 0u32.to_le_bytes(), "context_length is 0, but it must be at least 1"),
        ] {
            let mut bytes = whole.clone();
            let at = find(&bytes, format!("qwen3moe.{key}").as_bytes()) + 4;
            bytes[at..at + 4].copy_from_slice(&value);
            fs::write(&path, bytes).expect("written");
            let text = error(&path).to_string();
            assert!(text.contains(want) && text.contains("damaged.gguf"), "{text}");
        }

        let mut bytes = whole;
        // Types of list and item and the length come first; then each token has a length of 8 bytes before it.
        let mut at = find(&bytes, b"tokenizer.ggml.tokens") + 4 + 4 + 8;
        let mut seen = std::collections::HashMap::new();
        let (from, to, n) = loop {
            let n = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes")) as usize;
            if let Some(from) = seen.insert(n, at + 8).filter(|_| n > 0) {
                break (from, at + 8, n);
            }
            at += 8 + n;
        };
        bytes.copy_within(from..from + n, to);
        fs::write(&path, bytes).expect("written");
        let error = error(&path);
        assert!(matches!(&error, LlamaError::Inconsistent { reason, .. } if reason.contains("are both")), "{error}");
    }

    // Symptom: 4294967295 layers ended the process, short of 100 GB for a pattern each.
    #[test]
    fn experts_on_the_cpu_change_nothing_there() {
        for cpu_moe in [CpuMoe::All, CpuMoe::First(3), CpuMoe::First(u32::MAX)] {
            let device = Some(model().device().clone());
            let params = ModelParams { device, cpu_moe, ..ModelParams::default() };
            Model::load(&Backend::init(), testing::path(), &params).expect("loads");
        }
    }
}
