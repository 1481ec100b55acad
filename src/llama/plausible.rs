//! Whether the numbers that a model's header gives to attention and normalisation can be computed with.
//!
//! Never doubts a key that is missing: llama.cpp has a default for it, or says itself that it must be there.

use std::collections::BTreeMap;

use super::gguf::{Tensor, Value};

/// Architectures whose graph asserts that the whole head is rotated (llama.cpp's src/models at the pinned version,
/// `n_embd_head == n_rot`).
const WHOLE_HEAD: [&str; 62] = [
    "apertus",
    "arcee",
    "arctic",
    "baichuan",
    "chameleon",
    "codeshell",
    "cogvlm",
    "cohere2moe",
    "dbrx",
    "deci",
    "deepseek",
    "dots1",
    "dream",
    "ernie4_5",
    "ernie4_5-moe",
    "exaone",
    "exaone-moe",
    "exaone4",
    "falcon",
    "granite",
    "granite_swa",
    "granitemoe",
    "graniteswitch",
    "grok",
    "grovemoe",
    "hunyuan-dense",
    "hunyuan-moe",
    "hunyuan_vl",
    "hy_v3",
    "internlm2",
    "jais2",
    "llada",
    "llada-moe",
    "llama",
    "llama-embed",
    "llama4",
    "maincoder",
    "mellum",
    "minicpm",
    "mistral3",
    "olmo",
    "olmo2",
    "olmoe",
    "orion",
    "paddleocr",
    "pangu-embedded",
    "plamo",
    "pockettts",
    "qwen2",
    "qwen2moe",
    "qwen2vl",
    "qwen3",
    "qwen3moe",
    "qwen3vl",
    "qwen3vlmoe",
    "rnd1",
    "seed_oss",
    "smallthinker",
    "smollm3",
    "starcoder2",
    "talkie",
    "xverse",
];

/// Added under a root, which asserts that it is not negative (ggml-cpu/ops.cpp).
const EPSILONS: [&str; 3] =
    ["attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon"];

/// Powers of it are the rotation's angles.
const BASES: [&str; 2] = ["rope.freq_base", "rope.freq_base_swa"];

/// The first number of the architecture `arch` that ends the process in an assert of ggml's, or of which nothing but NaN
/// can come: its key, its value and what it must be.
pub(super) fn implausible(arch: &str, values: &BTreeMap<String, Value>) -> Option<String> {
    let prefix = format!("{arch}.");
    let number = |name: &str| match values.get(&format!("{prefix}{name}")) {
        Some(Value::Unsigned(n)) => Some(*n),
        _ => None,
    };
    for (key, value) in values {
        let Some(name) = key.strip_prefix(&prefix) else { continue };
        let Value::Float(x) = *value else { continue };
        let want = if EPSILONS.contains(&name) {
            (!x.is_finite() || x < 0.0).then_some("0 or more")
        } else if BASES.contains(&name) {
            (!x.is_finite() || x <= 0.0).then_some("more than 0")
        } else {
            x.is_nan().then_some("a number")
        };
        if let Some(want) = want {
            return Some(format!("{key} is {x}, but it must be {want}"));
        }
    }
    if number("context_length") == Some(0) {
        return Some(format!("{prefix}context_length is 0, but it must be at least 1"));
    }
    rotated(arch, number)
}

/// Rotated numbers of a head: all of them where the graph asserts it, otherwise pairs, as many as there are at most.
/// None at all is what a model without positions says.
fn rotated(arch: &str, number: impl Fn(&str) -> Option<u64>) -> Option<String> {
    let n_rot = number("rope.dimension_count")?;
    let head = || number("embedding_length")?.checked_div(number("attention.head_count")?);
    let n_head = number("attention.key_length").or_else(head)?;
    // Layers with a sliding window may have heads of their own, and the first layer may be one.
    let one_kind = number("rope.dimension_count_swa").or_else(|| number("attention.key_length_swa")).is_none();
    let want = if WHOLE_HEAD.contains(&arch) && one_kind {
        (n_rot != n_head).then(|| format!("{n_head}, the length of a head"))
    } else {
        (n_rot > n_head || n_rot % 2 == 1).then(|| format!("even and at most {n_head}, the length of a head"))
    };
    want.map(|want| format!("{arch}.rope.dimension_count is {n_rot}, but it must be {want}"))
}

/// The first layer whose number of key heads, where each layer has its own, is not that of its weights: llama.cpp holds
/// only the first layer's against the tensors, and ends the process over another one in the graph.
pub(super) fn misheaded(arch: &str, values: &BTreeMap<String, Value>, tensors: &[Tensor]) -> Option<String> {
    let value = |name: &str| values.get(&format!("{arch}.{name}"));
    let Some(Value::Array { ints, .. }) = value("attention.head_count_kv") else { return None };
    // Layers with a sliding window may have heads of another length.
    if value("attention.key_length_swa").is_some() {
        return None;
    }
    let head = || value("embedding_length")?.number()?.checked_div(value("attention.head_count")?.number()?);
    let n_head = i64::try_from(value("attention.key_length").and_then(Value::number).or_else(head)?).ok()?;
    ints.iter().enumerate().find_map(|(layer, &told)| {
        let name = format!("blk.{layer}.attn_k.weight");
        let rows = tensors.iter().find(|tensor| tensor.name == name)?.shape[1];
        let there = rows.checked_div(n_head).filter(|there| there * n_head == rows && *there != told)?;
        Some(format!("{arch}.attention.head_count_kv is {told} in layer {layer}, but {name} holds {there}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // Symptom: a layer's head_count_kv of 0 in an array ended the process in GGML_ASSERT(a->ne[0] == b->ne[0]).
    #[test]
    fn key_heads_of_a_layer_are_those_of_its_weights() {
        let told = |heads: &[i64], more: &[(&str, u64)]| {
            let array = Value::Array { kind: "u32".to_owned(), len: heads.len(), ints: heads.to_vec() };
            let more = more.iter().map(|&(name, n)| (format!("m.{name}"), Value::Unsigned(n)));
            let values = more.chain([("m.attention.head_count_kv".to_owned(), array)]).collect();
            let tensors: Vec<_> = [128, 64, 128]
                .iter()
                .enumerate()
                .map(|(layer, &rows)| Tensor {
                    name: format!("blk.{layer}.attn_k.weight"),
                    type_: 0,
                    shape: [256, rows, 1, 1],
                    bytes: 0,
                })
                .collect();
            misheaded("m", &values, &tensors)
        };
        let length = [("attention.key_length", 64)];
        assert_eq!(told(&[2, 1, 2], &length), None);
        let want = "m.attention.head_count_kv is 0 in layer 1, but blk.1.attn_k.weight holds 1";
        assert_eq!(told(&[2, 0, 2], &length).as_deref(), Some(want));
        for wrong in [-1, 1, 3, 1 << 30] {
            assert!(told(&[2, 1, wrong], &length).is_some(), "{wrong}");
        }
        // A length that follows from the whole, layers without keys, and heads of two lengths.
        assert!(told(&[2, 2, 2], &[("embedding_length", 256), ("attention.head_count", 4)]).is_some());
        assert_eq!(told(&[2, 1, 2, 0], &length), None);
        assert_eq!(told(&[2, 0, 2], &[("attention.key_length", 64), ("attention.key_length_swa", 32)]), None);
        assert_eq!(told(&[2, 0, 2], &[]), None);
    }

    fn told(arch: &str, pairs: &[(&str, Value)]) -> Option<String> {
        implausible(arch, &pairs.iter().map(|(name, value)| (format!("{arch}.{name}"), value.clone())).collect())
    }

    #[test]
    fn architectures_are_listed_once_in_order() {
        assert!(WHOLE_HEAD.is_sorted_by(|a, b| a < b));
    }

    // Symptom: a damaged rope.dimension_count ended the process in GGML_ASSERT(n_embd_head == n_rot).
    #[test]
    fn what_is_rotated_fits_the_head() {
        let with = |arch: &str, n_rot: u64, more: &[(&str, u64)]| {
            let base = [("rope.dimension_count", n_rot), ("embedding_length", 256), ("attention.head_count", 4)];
            let pairs = base.iter().chain(more).map(|&(name, n)| (name, Value::Unsigned(n)));
            told(arch, &pairs.collect::<Vec<_>>())
        };
        assert_eq!(with("qwen3moe", 64, &[]), None);
        assert_eq!(with("qwen3moe", 32, &[("attention.key_length", 32)]), None);
        let want = "qwen3moe.rope.dimension_count is 63, but it must be 64, the length of a head";
        assert_eq!(with("qwen3moe", 63, &[]).as_deref(), Some(want));
        for n_rot in [0, 1, 62, 65, 66, (1 << 31) - 1] {
            assert!(with("qwen3moe", n_rot, &[]).is_some(), "{n_rot}");
        }
        for (n_rot, fits) in [(0, true), (16, true), (64, true), (63, false), (66, false), (1 << 31, false)] {
            assert_eq!(with("glm4moe", n_rot, &[]).is_none(), fits, "{n_rot}");
        }
        assert_eq!(with("llama4", 32, &[("rope.dimension_count_swa", 64)]), None);
        // No heads, or one number a layer: llama.cpp has the last word.
        assert_eq!(with("qwen3moe", 5, &[("attention.head_count", 0)]), None);
        assert_eq!(told("qwen3moe", &[("rope.dimension_count", Value::Unsigned(5))]), None);
    }

    // Symptom: an epsilon of -1 or NaN ended the process in GGML_ASSERT(eps >= 0.0f), a base of NaN all workers.
    #[test]
    fn what_gives_nothing_but_nan_is_told() {
        let float = |name: &str, x: f64| told("m", &[(name, Value::Float(x))]);
        for (name, good, bad) in [
            ("attention.layer_norm_rms_epsilon", [0.0, 1e-6], [-1.0, f64::INFINITY]),
            ("attention.layer_norm_epsilon", [0.0, 1e-5], [-1e-6, f64::NAN]),
            ("rope.freq_base", [1.0, 1e6], [0.0, -1e4]),
            ("rope.freq_base_swa", [1e4, 5e5], [f64::INFINITY, f64::NAN]),
            ("expert_weights_scale", [-1.0, 2.5], [f64::NAN, -f64::NAN]),
        ] {
            assert_eq!(good.map(|x| float(name, x)), [None, None], "{name}");
            assert!(bad.map(|x| float(name, x)).iter().all(Option::is_some), "{name}");
        }
        let want = "m.attention.layer_norm_rms_epsilon is NaN, but it must be 0 or more";
        assert_eq!(float("attention.layer_norm_rms_epsilon", f64::NAN).as_deref(), Some(want));
        let base = "m.rope.freq_base is NaN, but it must be more than 0";
        assert_eq!(float("rope.freq_base", f64::NAN).as_deref(), Some(base));
        assert_eq!(float("rope.freq_base_of_another", 0.0), None);
    }

    // Symptom: "slot length, batch and ubatch must be at least 1", without the file's name.
    #[test]
    fn a_context_of_nothing_is_told() {
        let context = |n: u64| told("m", &[("context_length", Value::Unsigned(n))]);
        assert_eq!(context(0).as_deref(), Some("m.context_length is 0, but it must be at least 1"));
        assert_eq!(context(1), None);
    }
}
