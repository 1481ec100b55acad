//! How a context is made: its settings, what they cost, and which cannot work.
//!
//! Never creates one; [`Context`](super::Context) does.

use std::fmt;

use llama_cpp_sys_2 as sys;

use super::{error::LlamaError, model::Model, tap::Tap};
use crate::types::CpuSet;

/// The type keys or values are kept in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvType {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    #[default]
    F16,
    /// bfloat16.
    Bf16,
    /// 8 bits in blocks of 32.
    Q8_0,
    /// 4 bits in blocks of 32.
    Q4_0,
}

impl KvType {
    fn raw(self) -> sys::ggml_type {
        match self {
            Self::F32 => sys::GGML_TYPE_F32,
            Self::F16 => sys::GGML_TYPE_F16,
            Self::Bf16 => sys::GGML_TYPE_BF16,
            Self::Q8_0 => sys::GGML_TYPE_Q8_0,
            Self::Q4_0 => sys::GGML_TYPE_Q4_0,
        }
    }

    /// Bytes of `n` elements.
    pub fn bytes(self, n: u64) -> u64 {
        match self {
            Self::F32 => 4 * n,
            Self::F16 | Self::Bf16 => 2 * n,
            Self::Q8_0 => n * 34 / 32,
            Self::Q4_0 => n * 18 / 32,
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        })
    }
}

/// How a context is made. The default is one slot, with flash attention off and a KV stream a slot: on the CPU the
/// logits of a sequence then depend neither on its slot and thread count, nor on where its prompt is cut, nor on who
/// shares its batch, as long as somebody does ([`Backend::single_token_differs`](super::Backend::single_token_differs)).
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "llama.cpp's own switches, each independent")]
pub struct ContextParams {
    /// The context's name in messages, such as `decode 3`.
    pub name: String,
    /// Sequences it holds; their ids are 0 to `n_slots - 1`.
    pub n_slots: u32,
    /// Tokens a sequence may have. Rounded up to 256 with a stream a slot.
    pub n_ctx_slot: u32,
    /// Tokens a batch may have; at least `n_slots`.
    pub n_batch: u32,
    /// Tokens computed at once.
    pub n_ubatch: u32,
    /// Rows of a batch whose logits may be wanted; at least `n_slots`. More costs a vocabulary of floats each.
    pub n_outputs: u32,
    /// CPU threads.
    pub n_threads: u32,
    /// Processors those threads are pinned to, as a pool of the context's own; if empty, ggml starts threads as it needs
    /// them, anywhere.
    pub cpus: CpuSet,
    /// One KV stream for all sequences instead of one each.
    pub kv_unified: bool,
    /// Flash attention.
    pub flash_attn: bool,
    /// Type of the keys.
    pub type_k: KvType,
    /// Type of the values; quantised ones need flash attention.
    pub type_v: KvType,
    /// Keep all tokens in sliding-window layers, so that a prefix can be used again.
    pub swa_full: bool,
    /// Carry a tap, for [`Context::decode_tapped`](super::Context::decode_tapped).
    pub tap: bool,
    /// Compute large operations of host tensors on the device.
    pub op_offload: bool,
}

impl Default for ContextParams {
    fn default() -> Self {
        Self {
            name: "context".to_owned(),
            n_slots: 1,
            n_ctx_slot: 1024,
            n_batch: 512,
            n_ubatch: 512,
            n_outputs: 0,
            n_threads: 1,
            cpus: CpuSet::default(),
            kv_unified: false,
            flash_attn: false,
            type_k: KvType::F16,
            type_v: KvType::F16,
            swa_full: false,
            tap: false,
            op_offload: true,
        }
    }
}

/// Sequences llama.cpp allows in a context (`LLAMA_MAX_SEQ`).
const MAX_SLOTS: u32 = 256;

pub(super) fn setting(params: &ContextParams, reason: &str) -> LlamaError {
    LlamaError::ContextSetting { name: params.name.clone(), reason: reason.to_owned() }
}

pub(super) fn check(params: &ContextParams) -> Result<(), LlamaError> {
    let n_ctx = u64::from(params.n_slots) * u64::from(params.n_ctx_slot);
    let quantised = matches!(params.type_v, KvType::Q8_0 | KvType::Q4_0);
    let problem = if params.n_slots == 0 || params.n_slots > MAX_SLOTS {
        format!("{} slots: llama.cpp allows 1 to {MAX_SLOTS}", params.n_slots)
    } else if params.n_ctx_slot == 0 || params.n_batch == 0 || params.n_ubatch == 0 {
        "slot length, batch and ubatch must be at least 1".to_owned()
    } else if i32::try_from(n_ctx).is_err() || i32::try_from(params.n_batch).is_err() {
        format!("{n_ctx} tokens of context and batches of {}: llama.cpp counts in 31 bits", params.n_batch)
    } else if params.n_threads == 0 || params.n_threads > 512 {
        format!("{} threads: give 1 to 512", params.n_threads)
    } else if quantised && !params.flash_attn {
        format!("values of type {} need flash attention", params.type_v)
    } else {
        return Ok(());
    };
    Err(setting(params, &problem))
}

fn kv_bytes(model: &Model, params: &ContextParams) -> u64 {
    let slot = if params.kv_unified { params.n_ctx_slot } else { params.n_ctx_slot.next_multiple_of(256) };
    u64::from(params.n_slots) * u64::from(slot) * model.kv_bytes_per_token(params.type_k, params.type_v)
}

pub(super) fn out_of_memory(model: &Model, params: &ContextParams) -> LlamaError {
    LlamaError::OutOfMemory {
        name: params.name.clone(),
        mib: kv_bytes(model, params).div_ceil(1 << 20),
        n_slots: params.n_slots,
        n_ctx_slot: params.n_ctx_slot,
        device: model.place(),
    }
}

/// Hosts promise more memory than they have and end the process when it is used, so what cannot fit is refused first.
pub(super) fn check_memory(model: &Model, params: &ContextParams) -> Result<(), LlamaError> {
    let facts = model.facts();
    let is_bound = facts.n_swa > 0 || facts.recurrent || facts.hybrid;
    let free = || model.devices().iter().map(|device| device.info().free_bytes).sum::<u64>();
    if !is_bound && !model.is_foreseen() && kv_bytes(model, params) > free() {
        return Err(out_of_memory(model, params));
    }
    Ok(())
}

pub(super) fn raw_params(params: &ContextParams, tap: Option<&Tap>) -> sys::llama_context_params {
    // SAFETY: no precondition.
    let mut raw = unsafe { sys::llama_context_default_params() };
    raw.n_ctx = params.n_slots * params.n_ctx_slot;
    raw.n_batch = params.n_batch;
    raw.n_ubatch = params.n_ubatch;
    raw.n_seq_max = params.n_slots;
    raw.n_outputs_max = params.n_outputs;
    raw.n_threads = params.n_threads.cast_signed();
    raw.n_threads_batch = params.n_threads.cast_signed();
    raw.flash_attn_type =
        if params.flash_attn { sys::LLAMA_FLASH_ATTN_TYPE_ENABLED } else { sys::LLAMA_FLASH_ATTN_TYPE_DISABLED };
    raw.type_k = params.type_k.raw();
    raw.type_v = params.type_v.raw();
    raw.kv_unified = params.kv_unified;
    raw.swa_full = params.swa_full;
    raw.op_offload = params.op_offload;
    raw.no_perf = true;
    if let Some(tap) = tap {
        (raw.cb_eval, raw.cb_eval_user_data) = tap.callback();
    }
    raw
}
