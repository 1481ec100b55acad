//! A model of 128 experts, 8 a token, of any width, whose tokens come in 16 groups that share no expert.
//!
//! Never computes anything that means something: its weights are a pattern.

use std::path::Path;

use eldr::llama::gguf_file::{GgufError, GgufWriter, Sink, TensorType, Value};

use super::support::planted::{N_VOCAB, vocab};

pub const N_EXPERT: usize = 128;
pub const N_USED: usize = 8;
/// Groups of tokens, each with `N_USED` experts of its own.
pub const N_GROUPS: usize = N_EXPERT / N_USED;
pub const N_LAYER: usize = 4;
/// Enough for a dimension of its own for every token; a multiple of every block length.
const N_EMBD: usize = 1024;
const N_HEAD: usize = 4;
const HEAD: usize = 128;
/// Bytes of 32 numbers in `Q8_0`: a scale and a byte each.
const BLOCK: usize = 34;

/// A token of a group.
pub fn token(group: usize) -> i32 {
    // The first ones are control tokens.
    i32::try_from(N_GROUPS + group).expect("a few groups")
}

/// Writes the model; its experts' hidden dimension is `n_ff`, a multiple of 32.
pub fn write(path: &Path, n_ff: usize) -> Result<(), GgufError> {
    let mut writer = GgufWriter::new();
    vocab::put(&mut writer);
    metadata(&mut writer, n_ff)?;
    let mut tensors: Vec<(String, TensorType, Vec<usize>)> = vec![
        ("token_embd.weight".to_owned(), TensorType::F32, vec![N_EMBD, N_VOCAB]),
        ("output_norm.weight".to_owned(), TensorType::F32, vec![N_EMBD]),
        ("output.weight".to_owned(), TensorType::Q8_0, vec![N_EMBD, N_VOCAB]),
    ];
    for layer in 0..N_LAYER {
        let of = |part: &str| format!("blk.{layer}.{part}.weight");
        tensors.extend([
            (of("attn_norm"), TensorType::F32, vec![N_EMBD]),
            (of("attn_q"), TensorType::Q8_0, vec![N_EMBD, N_HEAD * HEAD]),
            (of("attn_k"), TensorType::Q8_0, vec![N_EMBD, N_HEAD * HEAD]),
            (of("attn_v"), TensorType::Q8_0, vec![N_EMBD, N_HEAD * HEAD]),
            (of("attn_output"), TensorType::Q8_0, vec![N_HEAD * HEAD, N_EMBD]),
            (of("attn_q_norm"), TensorType::F32, vec![HEAD]),
            (of("attn_k_norm"), TensorType::F32, vec![HEAD]),
            (of("ffn_norm"), TensorType::F32, vec![N_EMBD]),
            (of("ffn_gate_inp"), TensorType::F32, vec![N_EMBD, N_EXPERT]),
            (of("ffn_gate_exps"), TensorType::Q8_0, vec![N_EMBD, n_ff, N_EXPERT]),
            (of("ffn_up_exps"), TensorType::Q8_0, vec![N_EMBD, n_ff, N_EXPERT]),
            (of("ffn_down_exps"), TensorType::Q8_0, vec![n_ff, N_EMBD, N_EXPERT]),
        ]);
    }
    for (name, kind, shape) in &tensors {
        writer.add_tensor(name, *kind, &shape.iter().map(|&n| n as u64).collect::<Vec<_>>())?;
    }
    let mut all = tensors.iter();
    writer.write(path, |_, sink| {
        let (name, kind, shape) = all.next().expect("as many as were added");
        put(name, *kind, shape, sink)
    })?;
    Ok(())
}

fn metadata(writer: &mut GgufWriter, n_ff: usize) -> Result<(), GgufError> {
    writer.set("general.architecture", "qwen3moe")?;
    writer.set("general.name", "wide")?;
    for (key, value) in [
        ("context_length", 4096),
        ("embedding_length", N_EMBD),
        ("block_count", N_LAYER),
        ("feed_forward_length", n_ff),
        ("expert_feed_forward_length", n_ff),
        ("expert_count", N_EXPERT),
        ("expert_used_count", N_USED),
        ("attention.head_count", N_HEAD),
        ("attention.head_count_kv", N_HEAD),
        ("attention.key_length", HEAD),
        ("attention.value_length", HEAD),
        ("rope.dimension_count", HEAD),
    ] {
        writer.set(&format!("qwen3moe.{key}"), Value::U32(value as u32))?;
    }
    writer.set("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
}

/// What attention and experts add to the residual stream is a thousandth of the token's own dimension and less.
fn put(name: &str, kind: TensorType, shape: &[usize], sink: &mut Sink<'_>) -> Result<(), GgufError> {
    let n: usize = shape.iter().product();
    if kind == TensorType::Q8_0 {
        // 2^-20 as a half float: with bytes of at most 15 in size, sums over a row stay near nothing.
        let mut block = [0; BLOCK];
        block[0] = 0x10;
        let rows = n / shape[0];
        let mut row = vec![0; shape[0] / 32 * BLOCK];
        for index in 0..rows {
            for (at, part) in row.chunks_exact_mut(BLOCK).enumerate() {
                for (i, byte) in block[2..].iter_mut().enumerate() {
                    *byte = ((index * 7 + at * 5 + i * 3) % 31) as u8;
                    *byte = byte.wrapping_sub(15);
                }
                part.copy_from_slice(&block);
            }
            sink.put(&row)?;
        }
        return Ok(());
    }
    let value = |place: usize| match name {
        // The residual stream holds a token in a dimension of its own.
        "token_embd.weight" => f32::from(place % N_EMBD == place / N_EMBD),
        // A gate sees that dimension: a token's group chooses its experts, each a little less than the one before.
        _ if name.ends_with("ffn_gate_inp.weight") => {
            let (dim, expert) = (place % N_EMBD, place / N_EMBD);
            let is_own = dim < N_VOCAB && expert / N_USED == dim % N_GROUPS;
            if is_own { 0.1 - (expert % N_USED) as f32 * 1e-3 } else { 0.0 }
        }
        _ => 1.0,
    };
    let bytes: Vec<u8> = (0..n).flat_map(|place| value(place).to_le_bytes()).collect();
    sink.put(&bytes)
}
