//! What a model's header says about its shape, its experts and the memory a token needs.
//!
//! Never asks llama.cpp: it is all in the metadata and the tensor table.

use std::collections::BTreeMap;

use crate::types::MoeShape;

use super::{
    gguf::{Header, Tensor, Value},
    plausible::implausible,
};

/// A model's size and shape.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// The architecture's name in GGUF, such as `qwen3moe`.
    pub arch: String,
    /// llama.cpp's description: architecture, size and quantisation.
    pub desc: String,
    /// Layers, without those for multi-token prediction.
    pub n_layer: u32,
    /// Width of the residual stream.
    pub n_embd: u32,
    /// Heads of keys and values of the first layer.
    pub n_head_kv: u32,
    /// Tokens of context the model was trained with.
    pub n_ctx_train: u32,
    /// Tokens of the vocabulary.
    pub n_vocab: u32,
    /// Parameters.
    pub n_params: u64,
    /// Bytes of all tensors.
    pub size_bytes: u64,
    /// Width of the sliding attention window; 0 without one.
    pub n_swa: u32,
    /// Layers keep a state instead of keys and values (Mamba, RWKV): part of a sequence cannot be dropped.
    pub recurrent: bool,
    /// Some layers do.
    pub hybrid: bool,
    /// Layers, experts and picks; `None` for a dense model.
    pub moe: Option<MoeShape>,
    /// What an expert weighs; `None` for a dense model.
    pub experts: Option<ExpertBytes>,
    /// SHA-256 over the architecture, the metadata that changes what the model computes, and the tensor table; an inflated
    /// model has that of its source.
    pub fingerprint: String,
}

/// How a mixture-of-experts model's bytes are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertBytes {
    /// One expert of one layer, averaged over the layers.
    pub expert: u64,
    /// All experts of all layers.
    pub all_experts: u64,
    /// Everything that every token reads.
    pub dense: u64,
}

/// Layers and experts llama.cpp has room for (llama-hparams.h, `LLAMA_MAX_LAYERS`, `LLAMA_MAX_EXPERTS`).
const MAX_LAYERS: u64 = 512;
const MAX_EXPERTS: u64 = 1024;

/// The first thing in the metadata that fails an assert of llama.cpp's or ggml's, which ends the process, or that can
/// not be computed with.
pub(super) fn contradiction(values: &BTreeMap<String, Value>) -> Option<String> {
    let Some(Value::Text(arch)) = values.get("general.architecture") else { return None };
    miscounted(arch, values).or_else(|| implausible(arch, values))
}

/// Layers and experts that fail an assert of the loader's (llama-model.cpp, `load_hparams`).
fn miscounted(arch: &str, values: &BTreeMap<String, Value>) -> Option<String> {
    let key = |name: &str| format!("{arch}.{name}");
    let number = |name: &str| values.get(&key(name)).and_then(Value::number);
    let wrong = |name: &str, want: String| Some(format!("{} is {}, but it must be {want}", key(name), number(name)?));

    // Where it is missing, llama.cpp says so itself.
    let n_layer = number("block_count").unwrap_or(1);
    if !(1..=MAX_LAYERS).contains(&n_layer) {
        return wrong("block_count", format!("1 to {MAX_LAYERS}"));
    }
    if number("nextn_predict_layers").is_some_and(|n| n > n_layer) {
        return wrong("nextn_predict_layers", format!("at most the {n_layer} of {}", key("block_count")));
    }
    let n_expert = number("expert_count").unwrap_or(0);
    if n_expert <= 1 && matches!(arch, "hunyuan_vl" | "hunyuan-dense") {
        return None;
    }
    if n_expert > MAX_EXPERTS {
        return wrong("expert_count", format!("at most {MAX_EXPERTS}"));
    }
    let n_used = number("expert_used_count").unwrap_or(0);
    let n_groups = number("expert_group_count").unwrap_or(0);
    if n_expert == 0 {
        let none = || format!("0 without {}", key("expert_count"));
        return match (n_used, n_groups) {
            (0, 0) => None,
            (0, _) => wrong("expert_group_count", none()),
            _ => wrong("expert_used_count", none()),
        };
    }
    if !(1..=n_expert).contains(&n_used) {
        let name = key("expert_used_count");
        return Some(format!("{name} is {n_used}, but it must be 1 to {n_expert} ({})", key("expert_count")));
    }
    if n_groups >= n_expert || (n_groups > 1 && n_expert % n_groups != 0) {
        return wrong("expert_group_count", format!("less than the {n_expert} experts and divide them"));
    }
    let n_groups_used = number("expert_group_used_count").unwrap_or(0);
    if n_groups > 1 && !(1..n_groups).contains(&n_groups_used) {
        let name = key("expert_group_used_count");
        return Some(format!("{name} is {n_groups_used}, but it must be at least 1 and below the {n_groups} groups"));
    }
    None
}

/// Widths of one token's keys and values, summed over the layers, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvWidth {
    pub keys: u64,
    pub values: u64,
}

/// The MoE layers below `n_layer` and their experts. `None` when the model has none.
pub(super) fn moe_shape(header: &Header, n_layer: u32) -> Option<MoeShape> {
    let arch = header.text("general.architecture");
    let n_expert = u32::try_from(header.number(&format!("{arch}.expert_count"))?).ok()?;
    let n_expert_used = u32::try_from(header.number(&format!("{arch}.expert_used_count"))?).ok()?;
    let mut layers: Vec<u32> = header
        .tensors
        .iter()
        .filter_map(|t| layer_of(&t.name, "ffn_gate_inp.weight"))
        .filter(|&layer| layer < n_layer)
        .collect();
    layers.sort_unstable();
    let shape = MoeShape { layers, n_layer, n_expert, n_expert_used };
    (!shape.layers.is_empty() && n_expert > 0 && n_expert_used > 0).then_some(shape)
}

/// N of the tensor name `blk.N.<rest>`.
fn layer_of(name: &str, rest: &str) -> Option<u32> {
    let (layer, tail) = name.strip_prefix("blk.")?.split_once('.')?;
    if tail == rest { layer.parse().ok() } else { None }
}

pub(super) fn expert_bytes(header: &Header, shape: &MoeShape) -> ExpertBytes {
    let is_expert = |t: &&Tensor| t.name.contains("_exps.") || t.name.contains("_chexps.");
    let all_experts: u64 = header.tensors.iter().filter(is_expert).map(|t| t.bytes).sum();
    let total: u64 = header.tensors.iter().map(|t| t.bytes).sum();
    let n = u64::from(shape.n_expert) * shape.layers.len() as u64;
    ExpertBytes { expert: all_experts / n, all_experts, dense: total - all_experts }
}

/// Keys and values a token keeps while every layer attends to everything: an upper bound for sliding windows and for
/// layers with a recurrent state.
pub(super) fn kv_width(header: &Header, n_layer: u32) -> KvWidth {
    let arch = header.text("general.architecture");
    let number = |key: &str| header.number(&format!("{arch}.{key}"));
    let n_head = number("attention.head_count").unwrap_or(0);
    let head = number("embedding_length").unwrap_or(0).checked_div(n_head).unwrap_or(0);
    let key = number("attention.key_length").unwrap_or(head);
    let value = number("attention.value_length").unwrap_or(head);
    let heads = heads_kv(header, &format!("{arch}.attention.head_count_kv"), n_layer, n_head);
    // Latent attention keeps one compressed row, from which the values are computed too.
    let latent = number("attention.key_length_mla").is_some();
    KvWidth { keys: key * heads, values: if latent { 0 } else { value * heads } }
}

/// Heads of keys and values, summed over the layers: one number for all, or one a layer.
fn heads_kv(header: &Header, key: &str, n_layer: u32, default: u64) -> u64 {
    match header.values.get(key) {
        Some(Value::Array { ints, .. }) => {
            ints.iter().take(n_layer as usize).filter_map(|&n| u64::try_from(n).ok()).sum()
        }
        _ => header.number(key).unwrap_or(default) * u64::from(n_layer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, bytes: u64) -> Tensor {
        Tensor { name: name.to_owned(), type_: 0, shape: [1; 4], bytes }
    }

    fn header(pairs: &[(&str, Value)], tensors: Vec<Tensor>) -> Header {
        let mut values: BTreeMap<String, Value> = pairs.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
        values.insert("general.architecture".to_owned(), Value::Text("m".to_owned()));
        Header { values, tensors, digest: String::new() }
    }

    #[test]
    fn moe_layers_come_from_the_gates_and_exclude_prediction_layers() {
        let header = header(
            &[("m.expert_count", Value::Unsigned(8)), ("m.expert_used_count", Value::Unsigned(2))],
            vec![
                tensor("blk.10.ffn_gate_inp.weight", 1),
                tensor("blk.2.ffn_gate_inp.weight", 1),
                tensor("blk.2.ffn_gate_inp_shexp.weight", 1),
                tensor("blk.12.ffn_gate_inp.weight", 1),
                tensor("blk.1.ffn_gate.weight", 1),
                tensor("blk.2.ffn_up_exps.weight", 800),
                tensor("blk.10.ffn_up_exps.weight", 1600),
            ],
        );
        let shape = moe_shape(&header, 12).expect("a mixture of experts");
        assert_eq!(shape, MoeShape { layers: vec![2, 10], n_layer: 12, n_expert: 8, n_expert_used: 2 });
        assert_eq!(expert_bytes(&header, &shape), ExpertBytes { expert: 150, all_experts: 2400, dense: 5 });
    }

    // Symptom: 65 of 64 experts a token ended the process in an assert of llama.cpp; so did each of these.
    #[test]
    fn what_the_loader_would_assert_is_told_in_words() {
        let told = |pairs: &[(&str, u64)]| {
            let pairs: Vec<(&str, Value)> = pairs.iter().map(|&(key, n)| (key, Value::Unsigned(n))).collect();
            contradiction(&header(&pairs, Vec::new()).values)
        };
        let experts = |n, used| [("m.block_count", 4), ("m.expert_count", n), ("m.expert_used_count", used)];
        for (n, used) in [(0, 0), (1, 1), (64, 1), (64, 64), (1024, 8)] {
            assert_eq!(told(&experts(n, used)), None, "{used} of {n}");
        }
        let want = "m.expert_used_count is 65, but it must be 1 to 64 (m.expert_count)";
        assert_eq!(told(&experts(64, 65)).as_deref(), Some(want));
        assert!(told(&[("m.expert_count", 64)]).is_some_and(|why| why.contains("expert_used_count is 0")));
        assert!(told(&experts(64, 0)).is_some() && told(&experts(0, 4)).is_some());
        assert!(told(&experts(1025, 8)).is_some_and(|why| why.contains("at most 1024")));
        for n_layer in [0, 513] {
            assert!(told(&[("m.block_count", n_layer)]).is_some_and(|why| why.contains("1 to 512")));
        }
        assert!(told(&[("m.block_count", 4), ("m.nextn_predict_layers", 5)]).is_some());
        let groups = |n, used| {
            let groups = [("m.expert_group_count", n), ("m.expert_group_used_count", used)];
            told(&[&experts(64, 4)[..], &groups].concat())
        };
        assert_eq!([groups(0, 0), groups(1, 1), groups(8, 4)], [None, None, None]);
        for (n, used) in [(64, 1), (7, 2), (8, 0), (8, 8)] {
            assert!(groups(n, used).is_some(), "{used} of {n} groups");
        }
        assert!(told(&[("m.expert_group_count", 2)]).is_some());
    }

    #[test]
    fn a_dense_model_has_no_moe_shape() {
        assert_eq!(moe_shape(&header(&[], vec![tensor("blk.0.ffn_gate.weight", 1)]), 1), None);
        let zero = [("m.expert_count", Value::Unsigned(0)), ("m.expert_used_count", Value::Unsigned(0))];
        assert_eq!(moe_shape(&header(&zero, vec![tensor("blk.0.ffn_gate_inp.weight", 1)]), 1), None);
    }

    #[test]
    fn kv_width_follows_heads_a_layer_and_latent_attention() {
        let base = [("m.embedding_length", Value::Unsigned(64)), ("m.attention.head_count", Value::Unsigned(4))];
        let width = kv_width(&header(&base, Vec::new()), 2);
        assert_eq!(width, KvWidth { keys: 128, values: 128 });
        let ints = Value::Array { kind: "i32".to_owned(), len: 3, ints: vec![2, 0, 2] };
        let mixed = [&base[..], &[("m.attention.head_count_kv", ints)]].concat();
        assert_eq!(kv_width(&header(&mixed, Vec::new()), 3), KvWidth { keys: 64, values: 64 });
        let latent = [
            &base[..],
            &[
                ("m.attention.head_count_kv", Value::Unsigned(1)),
                ("m.attention.key_length", Value::Unsigned(40)),
                ("m.attention.key_length_mla", Value::Unsigned(24)),
            ],
        ]
        .concat();
        assert_eq!(kv_width(&header(&latent, Vec::new()), 2), KvWidth { keys: 80, values: 0 });
    }
}
