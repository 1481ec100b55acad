//! What a model and a context take, by device, before anything is allocated.
//!
//! Never judges it against what is free; the engine's plan does.

use super::{
    context::Context,
    device::{self, Device},
    error::LlamaError,
    guard,
};

/// Bytes on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryRow {
    /// ggml's name of the device; none is the host.
    pub device: Option<String>,
    /// Weights: the same for every context of the model.
    pub weights: u64,
    /// Keys and values.
    pub kv: u64,
    /// Intermediate results.
    pub compute: u64,
}

/// Kinds of buffers a context may have.
const MAX_ROWS: usize = 64;

impl Context {
    /// What the context and its model take on each device, pinned host memory counted as the host's. Exact for a model
    /// loaded with [`ModelParams::no_alloc`](super::ModelParams::no_alloc) too, which takes nothing.
    pub fn footprint(&self) -> Result<Vec<MemoryRow>, LlamaError> {
        let mut raw = std::array::from_fn::<_, MAX_ROWS, _>(|_| guard::eldr_guard_memory {
            device: std::ptr::null_mut(),
            is_host: false,
            model: 0,
            context: 0,
            compute: 0,
        });
        let mut n_rows = 0;
        // SAFETY: the context is open, and the places outlive the call.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_memory_of(self.raw(), raw.as_mut_ptr(), raw.len(), &raw mut n_rows, message, size)
        })
        .map_err(|e| LlamaError::Context { name: self.params().name.clone(), reason: e.to_string() })?;
        let mut rows: Vec<MemoryRow> = Vec::new();
        for part in raw.iter().take(n_rows) {
            let on_host = part.is_host || part.device.is_null();
            let device = if on_host { None } else { Some(device::name(part.device)) };
            let (weights, kv, compute) = (part.model as u64, part.context as u64, part.compute as u64);
            match rows.iter_mut().find(|row| row.device == device) {
                Some(row) => {
                    row.weights += weights;
                    row.kv += kv;
                    row.compute += compute;
                }
                None => rows.push(MemoryRow { device, weights, kv, compute }),
            }
        }
        Ok(rows)
    }
}

impl Device {
    /// The name [`MemoryRow::device`] has for it: none for the host.
    pub fn memory_name(&self) -> Option<&str> {
        (self.kind() != super::DeviceKind::Cpu).then_some(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::{
        Backend, ContextParams, Model, ModelParams,
        testing::{self, model},
    };

    #[test]
    fn what_is_foreseen_is_what_is_taken() {
        let params = ContextParams { n_slots: 3, n_ctx_slot: 256, ..ContextParams::default() };
        let device = Some(model().device().clone());
        let load = |no_alloc| {
            let params = ModelParams { device: device.clone(), use_mmap: false, no_alloc, ..ModelParams::default() };
            Model::load(&Backend::init(), testing::path(), &params).expect("loads")
        };
        let rows = |model: &Model| Context::new(model, &params).expect("a context").footprint().expect("its memory");
        let (foreseen, taken) = (rows(&load(true)), rows(&load(false)));
        assert_eq!(foreseen.len(), 1);
        assert_eq!(foreseen[0].kv, 3 * 256 * model().kv_bytes_per_token(params.type_k, params.type_v));
        assert!(foreseen[0].weights >= model().facts().size_bytes && foreseen[0].compute > 0, "{foreseen:?}");
        assert_eq!(foreseen, taken);
    }
}
