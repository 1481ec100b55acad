//! The planted models' weights: random where they only have to matter, shaped where picks must stay known.

use std::path::Path;

use eldr::{
    llama::gguf_file::{GgufWriter, TensorType},
    rng::Rng,
};

use super::vocab::N_VOCAB;

/// Width of the residual stream: a dimension a token, and scratch.
pub const N_EMBD: usize = 160;

/// Named weights in the order of the file; 32-bit floats, the contiguous axis first.
#[derive(Default)]
pub struct Tensors {
    all: Vec<(String, Vec<u64>, Vec<f32>)>,
}

impl Tensors {
    /// Adds a tensor whose numbers are `value` of their place in the contiguous axis and their row.
    pub fn put(&mut self, name: &str, shape: &[usize], mut value: impl FnMut(usize, usize) -> f32) {
        let n: usize = shape.iter().product();
        let data = (0..n).map(|i| value(i % shape[0], i / shape[0])).collect();
        self.all.push((name.to_owned(), shape.iter().map(|&n| n as u64).collect(), data));
    }

    /// A tensor of equal numbers.
    pub fn fill(&mut self, name: &str, shape: &[usize], value: f32) {
        self.put(name, shape, |_, _| value);
    }

    /// A tensor of random numbers in [-scale, scale].
    pub fn random(&mut self, name: &str, shape: &[usize], scale: f32, rng: &mut Rng) {
        self.put(name, shape, |_, _| scale * symmetric(rng));
    }

    /// A projection onto the residual stream (second axis) that writes to scratch dimensions only.
    pub fn put_into_scratch(&mut self, name: &str, shape: &[usize], scale: f32, rng: &mut Rng) {
        assert_eq!(shape[1], N_EMBD, "{name} does not write to the residual stream");
        self.put(name, shape, |_, row| if row % N_EMBD < N_VOCAB { 0.0 } else { scale * symmetric(rng) });
    }

    /// A vector over the residual stream (first axis) that is zero on token dimensions.
    pub fn put_on_scratch(&mut self, name: &str, shape: &[usize], scale: f32, rng: &mut Rng) {
        assert_eq!(shape[0], N_EMBD, "{name} is not of the residual stream");
        self.put(name, shape, |dim, _| if dim < N_VOCAB { 0.0 } else { scale * symmetric(rng) });
    }

    /// Writes the model.
    pub fn write(self, mut writer: GgufWriter, path: &Path) {
        for (name, shape, _) in &self.all {
            writer.add_tensor(name, TensorType::F32, shape).expect("writable");
        }
        let mut all = self.all.iter();
        writer
            .write(path, |name, sink| {
                let (next, _, data) = all.next().expect("as many as were added");
                assert_eq!(next, name);
                sink.put(&data.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
            })
            .expect("written");
    }
}

fn symmetric(rng: &mut Rng) -> f32 {
    (2.0 * rng.uniform() - 1.0) as f32
}
