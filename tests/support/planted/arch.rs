//! What each architecture needs: its metadata, its tensors, and the rule of its gate (llama.cpp's src/models).

use eldr::{
    llama::gguf_file::{Array, GgufWriter, Value},
    rng::Rng,
};

use super::{
    gate::{Gate, Rule},
    tensors::{N_EMBD, Tensors},
    vocab::N_VOCAB,
};

const N_HEAD: usize = 4;
const N_HEAD_KV: usize = 2;
const HEAD: usize = 64;
const N_FF: usize = 32;
/// `DeepSeek`'s attention: rank of queries and of keys and values, and a head's rotated and other part.
const LORA_Q: usize = 32;
const LORA_KV: usize = 32;
const ROPE: usize = 16;
const NOPE: usize = 16;
/// Tokens that a short convolution of `Lfm2Moe` looks at.
const CONVOLVED: usize = 3;

/// An architecture that can be planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    /// Softmax gate, every layer has experts.
    Qwen3Moe,
    /// Softmax gate, expert width in `feed_forward_length`.
    Llama,
    /// Biased gate, biased experts, attention sinks, a sliding window in every second layer.
    GptOss,
    /// Sigmoid gate with a choice bias and expert groups, a shared expert, a dense first layer, latent attention.
    DeepSeek2,
    /// A gate beside the block that norms and scales its own input, fused gate and up projections, sliding windows.
    Gemma4,
    /// Short convolutions, which keep a state of their last tokens only, beside attention in every second layer; a sigmoid
    /// gate with a choice bias; a dense first layer.
    Lfm2Moe,
    /// No experts.
    DenseLlama,
}

impl Arch {
    /// Tokens a sliding window holds, in the architectures that have one.
    pub const WINDOW: u32 = 16;

    /// The architectures with experts.
    pub const MOE: [Self; 5] = [Self::Qwen3Moe, Self::Llama, Self::GptOss, Self::DeepSeek2, Self::Gemma4];

    /// The one whose memory can not be cut.
    pub const HYBRID: Self = Self::Lfm2Moe;

    /// llama.cpp's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qwen3Moe => "qwen3moe",
            Self::Llama | Self::DenseLlama => "llama",
            Self::GptOss => "gpt-oss",
            Self::DeepSeek2 => "deepseek2",
            Self::Gemma4 => "gemma4",
            Self::Lfm2Moe => "lfm2moe",
        }
    }

    pub fn n_layer(self) -> u32 {
        match self {
            Self::Qwen3Moe | Self::DeepSeek2 | Self::Lfm2Moe => 5,
            Self::Llama | Self::DenseLlama => 4,
            Self::GptOss | Self::Gemma4 => 6,
        }
    }

    pub fn n_expert(self) -> u32 {
        match self {
            Self::Qwen3Moe | Self::GptOss => 32,
            Self::DeepSeek2 | Self::Gemma4 | Self::Lfm2Moe => 16,
            Self::Llama => 8,
            Self::DenseLlama => 0,
        }
    }

    pub fn n_expert_used(self) -> u32 {
        match self {
            Self::Qwen3Moe | Self::GptOss => 4,
            Self::DeepSeek2 | Self::Gemma4 | Self::Lfm2Moe => 3,
            Self::Llama => 2,
            Self::DenseLlama => 0,
        }
    }

    /// Whether some layers attend to a window only.
    pub fn has_window(self) -> bool {
        matches!(self, Self::GptOss | Self::Gemma4)
    }

    /// Whether a layer is a short convolution.
    fn is_recurrent(self, layer: u32) -> bool {
        self == Self::HYBRID && layer.is_multiple_of(2)
    }

    /// Width of a head.
    fn head(self) -> usize {
        // Its heads are as wide as the residual stream together.
        if self == Self::Lfm2Moe { N_EMBD / N_HEAD } else { HEAD }
    }

    fn has_experts(self, layer: u32) -> bool {
        match self {
            Self::DeepSeek2 | Self::Lfm2Moe => layer > 0,
            Self::DenseLlama => false,
            _ => true,
        }
    }

    /// The rule of one layer's gate, with biases of its own.
    fn rule(self, rng: &mut Rng) -> Rule {
        let n_expert = self.n_expert() as usize;
        let mut rule = Rule { n_expert, n_used: self.n_expert_used() as usize, ..Rule::default() };
        let mut bias = |scale: f64| Some((0..n_expert).map(|_| scale * (2.0 * rng.uniform() - 1.0)).collect());
        match self {
            Self::GptOss => rule.score_bias = bias(1.0),
            Self::DeepSeek2 => {
                rule.sigmoid = true;
                rule.choice_bias = bias(0.2);
                rule.groups = Some((4, 2));
            }
            Self::Lfm2Moe => {
                rule.sigmoid = true;
                rule.choice_bias = bias(0.2);
            }
            _ => {}
        }
        rule
    }
}

/// Puts the metadata and tensors of `arch`; returns llama.cpp's number and the gate of each layer with experts.
pub fn put(arch: Arch, writer: &mut GgufWriter, tensors: &mut Tensors, rng: &mut Rng) -> Vec<(u32, Gate)> {
    put_metadata(arch, writer);
    let shape = [N_EMBD, N_VOCAB];
    tensors.put("token_embd.weight", &shape, |dim, token| if dim == token { 1.0 } else { 0.0 });
    let output_norm = if arch == Arch::Lfm2Moe { "token_embd_norm.weight" } else { "output_norm.weight" };
    tensors.fill(output_norm, &[N_EMBD], 1.0);
    // Scratch dimensions are small beside the token's, so the output reads them through larger weights. Control tokens
    // have logit 0, which never is the largest.
    tensors.put("output.weight", &shape, |dim, token| {
        let scale = if dim < N_VOCAB { 0.1 } else { 2.0 };
        let value = scale * (2.0 * rng.uniform() - 1.0) as f32;
        if token < 2 { 0.0 } else { value }
    });
    if arch == Arch::Gemma4 {
        tensors.fill("rope_freqs.weight", &[HEAD / 2], 1.0);
    }
    let mut gates = Vec::new();
    for layer in 0..arch.n_layer() {
        let mut block = Block { prefix: format!("blk.{layer}"), arch, tensors, rng };
        if arch.is_recurrent(layer) {
            block.short_convolution();
        } else {
            block.attention();
        }
        if arch.has_experts(layer) {
            let rule = arch.rule(block.rng);
            let gate = rule.plant(block.rng);
            block.gate(&rule, &gate);
            block.experts();
            gates.push((layer, gate));
        } else {
            block.norm("ffn_norm");
            block.dense("ffn_gate", "ffn_up", "ffn_down");
        }
    }
    gates
}

fn put_metadata(arch: Arch, writer: &mut GgufWriter) {
    writer.set("general.architecture", arch.name()).expect("writable");
    writer.set("general.name", "planted").expect("writable");
    let mut set = |key: &str, value: Value| writer.set(&format!("{}.{key}", arch.name()), value).expect("writable");
    let n = |n: usize| Value::U32(n as u32);
    set("context_length", n(4096));
    set("embedding_length", n(N_EMBD));
    set("block_count", arch.n_layer().into());
    set("feed_forward_length", n(N_FF));
    set("attention.head_count", n(N_HEAD));
    set("attention.layer_norm_rms_epsilon", 1e-6.into());
    if arch.n_expert() > 0 {
        set("expert_count", arch.n_expert().into());
        set("expert_used_count", arch.n_expert_used().into());
    }
    if arch == Arch::DeepSeek2 {
        set("attention.head_count_kv", n(1));
        set("attention.key_length", n(LORA_KV + ROPE));
        set("attention.value_length", n(LORA_KV));
        set("attention.key_length_mla", n(NOPE + ROPE));
        set("attention.value_length_mla", n(NOPE));
        set("attention.q_lora_rank", n(LORA_Q));
        set("attention.kv_lora_rank", n(LORA_KV));
        set("rope.dimension_count", n(ROPE));
        set("leading_dense_block_count", n(1));
        set("expert_shared_count", n(1));
        set("expert_group_count", n(4));
        set("expert_group_used_count", n(2));
        set("expert_gating_func", n(2));
        set("expert_weights_norm", true.into());
        set("expert_weights_scale", 2.5.into());
    } else {
        if arch == Arch::Lfm2Moe {
            // A layer without keys and values is a convolution.
            let n_kv = |layer| if arch.is_recurrent(layer) { 0 } else { N_HEAD_KV as u32 };
            set("attention.head_count_kv", Value::Array(Array::U32((0..arch.n_layer()).map(n_kv).collect())));
            set("shortconv.l_cache", n(CONVOLVED));
            set("leading_dense_block_count", n(1));
            set("expert_gating_func", n(2));
        } else {
            set("attention.head_count_kv", n(N_HEAD_KV));
        }
        set("attention.key_length", n(arch.head()));
        set("attention.value_length", n(arch.head()));
        set("rope.dimension_count", n(arch.head()));
    }
    if !matches!(arch, Arch::Llama | Arch::DenseLlama) {
        set("expert_feed_forward_length", n(N_FF));
    }
    if arch.has_window() {
        set("attention.sliding_window", Arch::WINDOW.into());
    }
    if arch == Arch::Gemma4 {
        let windows = (0..arch.n_layer()).map(|layer| layer % 3 != 2).collect();
        set("attention.sliding_window_pattern", Value::Array(Array::Bool(windows)));
        set("attention.key_length_swa", n(HEAD));
        set("attention.value_length_swa", n(HEAD));
        set("rope.dimension_count_swa", n(HEAD));
        set("embedding_length_per_layer_input", n(0));
        set("final_logit_softcapping", 30.0.into());
    }
}

/// One layer while its tensors are put.
struct Block<'a> {
    prefix: String,
    arch: Arch,
    tensors: &'a mut Tensors,
    rng: &'a mut Rng,
}

impl Block<'_> {
    fn name(&self, part: &str) -> String {
        let suffix = if part.contains('.') { "" } else { ".weight" };
        format!("{}.{part}{suffix}", self.prefix)
    }

    fn norm(&mut self, part: &str) {
        self.tensors.fill(&self.name(part), &[N_EMBD], 1.0);
    }

    /// Normed inputs have length 12.6, so that this makes outputs near 1.
    fn read(&mut self, part: &str, shape: &[usize]) {
        self.tensors.random(&self.name(part), shape, 0.15, self.rng);
    }

    /// Outputs stay near a hundredth of the token's own dimension.
    fn write(&mut self, part: &str, shape: &[usize]) {
        self.tensors.put_into_scratch(&self.name(part), shape, 1e-3, self.rng);
    }

    /// A norm behind a block that may write to scratch dimensions only.
    fn norm_to_scratch(&mut self, part: &str) {
        self.tensors.put_on_scratch(&self.name(part), &[N_EMBD], 0.05, self.rng);
    }

    fn short_convolution(&mut self) {
        self.norm("attn_norm");
        self.tensors.random(&self.name("shortconv.conv.weight"), &[CONVOLVED, N_EMBD], 0.5, self.rng);
        self.read("shortconv.in_proj.weight", &[N_EMBD, 3 * N_EMBD]);
        self.write("shortconv.out_proj.weight", &[N_EMBD, N_EMBD]);
    }

    fn attention(&mut self) {
        self.norm("attn_norm");
        if self.arch == Arch::DeepSeek2 {
            self.tensors.fill(&self.name("attn_q_a_norm"), &[LORA_Q], 1.0);
            self.tensors.fill(&self.name("attn_kv_a_norm"), &[LORA_KV], 1.0);
            self.read("attn_q_a", &[N_EMBD, LORA_Q]);
            self.read("attn_q_b", &[LORA_Q, N_HEAD * (NOPE + ROPE)]);
            self.read("attn_kv_a_mqa", &[N_EMBD, LORA_KV + ROPE]);
            self.read("attn_k_b", &[NOPE, LORA_KV, N_HEAD]);
            self.read("attn_v_b", &[LORA_KV, NOPE, N_HEAD]);
            self.write("attn_output", &[N_HEAD * NOPE, N_EMBD]);
            return;
        }
        let head = self.arch.head();
        self.read("attn_q", &[N_EMBD, N_HEAD * head]);
        self.read("attn_k", &[N_EMBD, N_HEAD_KV * head]);
        self.read("attn_v", &[N_EMBD, N_HEAD_KV * head]);
        self.write("attn_output", &[N_HEAD * head, N_EMBD]);
        if matches!(self.arch, Arch::Qwen3Moe | Arch::Gemma4 | Arch::Lfm2Moe) {
            self.tensors.fill(&self.name("attn_q_norm"), &[head], 0.5);
            self.tensors.fill(&self.name("attn_k_norm"), &[head], 0.5);
        }
        if self.arch == Arch::GptOss {
            self.tensors.random(&self.name("attn_q.bias"), &[N_HEAD * HEAD], 0.1, self.rng);
            self.tensors.random(&self.name("attn_k.bias"), &[N_HEAD_KV * HEAD], 0.1, self.rng);
            self.tensors.random(&self.name("attn_v.bias"), &[N_HEAD_KV * HEAD], 0.1, self.rng);
            self.tensors.put_on_scratch(&self.name("attn_output.bias"), &[N_EMBD], 1e-3, self.rng);
            self.tensors.random(&self.name("attn_sinks"), &[N_HEAD], 1.0, self.rng);
        }
        if self.arch == Arch::Gemma4 {
            self.norm_to_scratch("post_attention_norm");
        }
    }

    /// The gate's weights: its table of scores, divided by what the token's dimension holds when the gate reads it.
    fn gate(&mut self, rule: &Rule, gate: &Gate) {
        let shape = [N_EMBD, rule.n_expert];
        let mut input = vec![(N_EMBD as f64).sqrt(); N_VOCAB];
        if self.arch == Arch::Gemma4 {
            // The gate norms the residual stream without weights, divides by the root of its width and scales it.
            let scale: Vec<f32> = (0..N_EMBD).map(|_| (0.5 + self.rng.uniform()) as f32).collect();
            self.tensors.put(&self.name("ffn_gate_inp.scale"), &[N_EMBD], |dim, _| scale[dim]);
            input = scale.iter().take(N_VOCAB).map(|&s| f64::from(s)).collect();
        }
        self.tensors.put(&self.name("ffn_gate_inp"), &shape, |dim, expert| {
            if dim < N_VOCAB { (gate.scores[dim][expert] / input[dim]) as f32 } else { 0.0 }
        });
        for (part, bias) in [("ffn_gate_inp.bias", &rule.score_bias), ("exp_probs_b.bias", &rule.choice_bias)] {
            if let Some(bias) = bias {
                self.tensors.put(&self.name(part), &[rule.n_expert], |expert, _| bias[expert] as f32);
            }
        }
    }

    fn experts(&mut self) {
        let n_expert = self.arch.n_expert() as usize;
        let (up, down) = ([N_EMBD, N_FF, n_expert], [N_FF, N_EMBD, n_expert]);
        self.norm(if self.arch == Arch::GptOss { "post_attention_norm" } else { "ffn_norm" });
        if self.arch == Arch::Gemma4 {
            self.read("ffn_gate_up_exps", &[N_EMBD, 2 * N_FF, n_expert]);
        } else {
            self.read("ffn_gate_exps", &up);
            self.read("ffn_up_exps", &up);
        }
        self.write("ffn_down_exps", &down);
        match self.arch {
            Arch::GptOss => {
                self.tensors.random(&self.name("ffn_gate_exps.bias"), &[N_FF, n_expert], 0.1, self.rng);
                self.tensors.random(&self.name("ffn_up_exps.bias"), &[N_FF, n_expert], 0.1, self.rng);
                self.tensors.put_on_scratch(&self.name("ffn_down_exps.bias"), &[N_EMBD, n_expert], 1e-3, self.rng);
            }
            Arch::DeepSeek2 => self.dense("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
            Arch::Gemma4 => {
                self.dense("ffn_gate", "ffn_up", "ffn_down");
                self.norm("pre_ffw_norm_2");
                self.norm("post_ffw_norm_1");
                self.norm("post_ffw_norm_2");
                self.norm_to_scratch("post_ffw_norm");
            }
            _ => {}
        }
    }

    fn dense(&mut self, gate: &str, up: &str, down: &str) {
        self.read(gate, &[N_EMBD, N_FF]);
        self.read(up, &[N_EMBD, N_FF]);
        self.write(down, &[N_FF, N_EMBD]);
    }
}
