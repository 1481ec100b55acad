//! Costs of known devices, from their makers' figures.
//!
//! Never measured: bandwidth and arithmetic are public peak figures, of which a stated share is assumed to be reached.

use serde::{Deserialize, Serialize};

use super::{DecodeCost, DeviceCost, HandoffCost, PrefillCost};

/// A device by its public peak figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preset {
    /// Its name on the command line.
    pub name: &'static str,
    /// Memory bandwidth in GB/s, as its maker states it.
    pub bandwidth: f64,
    /// Dense 16-bit arithmetic in TFLOP/s, as its maker states it.
    pub tflops: f64,
    /// Host link in GB/s, one way.
    pub link: f64,
}

/// Share of the peak bandwidth that reading weights is taken to reach.
const REACHED_BANDWIDTH: f64 = 0.7;
/// Share of the peak arithmetic that a prefill is taken to reach.
const REACHED_TFLOPS: f64 = 0.4;
/// Milliseconds of launches and bookkeeping that a layer is taken to cost a step.
const LAUNCH_MS: f64 = 0.02;

/// Devices by name.
pub const PRESETS: [Preset; 8] = [
    Preset { name: "rtx3090", bandwidth: 936.0, tflops: 71.0, link: 32.0 },
    Preset { name: "rtx4090", bandwidth: 1008.0, tflops: 165.0, link: 32.0 },
    Preset { name: "rtx5090", bandwidth: 1792.0, tflops: 210.0, link: 64.0 },
    Preset { name: "l40s", bandwidth: 864.0, tflops: 181.0, link: 32.0 },
    Preset { name: "a100-80gb", bandwidth: 2039.0, tflops: 312.0, link: 32.0 },
    Preset { name: "h100-sxm", bandwidth: 3350.0, tflops: 989.0, link: 64.0 },
    Preset { name: "h200", bandwidth: 4800.0, tflops: 989.0, link: 64.0 },
    Preset { name: "mi300x", bandwidth: 5300.0, tflops: 1307.0, link: 64.0 },
];

/// The sizes of a model that a preset's cost depends on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PresetModel {
    /// Bytes of one expert of one layer.
    pub expert_bytes: f64,
    /// Bytes of all other weights that a step reads.
    pub dense_bytes: f64,
    /// Bytes of the keys and values of one token.
    pub kv_bytes: f64,
    /// Parameters that a token is multiplied by.
    pub active_params: f64,
    /// Layers.
    pub n_layer: f64,
}

impl Preset {
    /// The preset of this name.
    pub fn named(name: &str) -> Option<Self> {
        PRESETS.into_iter().find(|preset| preset.name == name)
    }

    /// What steps of `model` take on the device: bytes over the reached bandwidth, arithmetic over the reached rate.
    pub fn cost(&self, model: &PresetModel) -> DeviceCost {
        let read_ms = |bytes: f64| bytes / (self.bandwidth * REACHED_BANDWIDTH * 1e6);
        let compute_ms = 2.0 * model.active_params / (self.tflops * REACHED_TFLOPS * 1e9);
        let fixed = read_ms(model.dense_bytes) + LAUNCH_MS * model.n_layer;
        DeviceCost {
            source: format!(
                "estimate for {}: {} GB/s and {} TFLOP/s as stated by its maker, of which {:.0} and {:.0}% are taken \
                 to be reached",
                self.name,
                self.bandwidth,
                self.tflops,
                REACHED_BANDWIDTH * 100.0,
                REACHED_TFLOPS * 100.0
            ),
            decode: DecodeCost {
                fixed,
                per_expert: read_ms(model.expert_bytes),
                per_token: compute_ms,
                per_kv_token: read_ms(model.kv_bytes),
            },
            prefill: PrefillCost { fixed, per_token: compute_ms, per_kv_token: 0.0 },
            handoff: HandoffCost { fixed: LAUNCH_MS, per_token: model.kv_bytes / (self.link * 1e6) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A Qwen3-30B-A3B in 8 bits: 128 experts of 3 * 2048 * 768 weights in each of 48 layers.
    const QWEN: PresetModel = PresetModel {
        expert_bytes: 5.0e6,
        dense_bytes: 1.5e9,
        kv_bytes: 98_304.0,
        active_params: 3.3e9,
        n_layer: 48.0,
    };

    #[test]
    fn twice_the_bandwidth_reads_in_half_the_time() {
        let slow = Preset { name: "slow", bandwidth: 1000.0, tflops: 100.0, link: 10.0 };
        let fast = Preset { bandwidth: 2000.0, ..slow };
        let (slow, fast) = (slow.cost(&QWEN), fast.cost(&QWEN));
        assert!((slow.decode.per_expert / fast.decode.per_expert - 2.0).abs() < 1e-9);
        // 5 MB at 700 GB/s.
        assert!((slow.decode.per_expert - 5.0 / 700.0).abs() < 1e-9, "{slow:?}");
        assert_eq!(slow.prefill.per_token.to_bits(), fast.prefill.per_token.to_bits());
        // 98,304 bytes at 10 GB/s are 9.8304 us.
        assert!((slow.handoff.per_token - 0.009_830_4).abs() < 1e-9);
    }

    #[test]
    fn every_preset_is_found_and_usable() {
        for preset in PRESETS {
            assert_eq!(Preset::named(preset.name), Some(preset));
            assert_eq!(preset.cost(&QWEN).problem(), None);
        }
        assert_eq!(Preset::named("abacus"), None);
    }
}
