//! Which devices a model's layers go to, and in which shares, as llama.cpp is told.
//!
//! Never measures a device: without shares llama.cpp divides the layers by what is free.

use std::{iter, ptr};

use llama_cpp_sys_2 as sys;

use super::{
    device::{Device, DeviceKind},
    model::ModelParams,
};

/// Most devices the layers of one model can be divided over: ggml schedules 16 backends a context
/// (`GGML_SCHED_MAX_BACKENDS`), of which the host takes one and a helper such as BLAS another.
pub const MAX_DEVICES: usize = 14;

/// The devices of a model, in the order of their layers.
pub(super) struct Spread {
    pub devices: Vec<Device>,
    /// With a null pointer at the end, and nothing else for the host.
    raw: Vec<sys::ggml_backend_dev_t>,
    /// By device, as many as llama.cpp reads; empty is by free memory.
    shares: Vec<f32>,
}

impl Spread {
    /// `first` and those beside it, as `params` say. Errors: what llama.cpp would read past an end for, or abort on.
    pub fn new(first: Device, params: &ModelParams) -> Result<Self, String> {
        let devices: Vec<Device> = iter::once(first).chain(params.beside.iter().cloned()).collect();
        let n = devices.len();
        let is_host = |device: &Device| device.kind() == DeviceKind::Cpu;
        if n > MAX_DEVICES {
            return Err(format!("{n} devices are asked for, and at most {MAX_DEVICES} can be"));
        }
        if n > 1 && devices.iter().any(is_host) {
            return Err("the host is no device to divide layers with".to_owned());
        }
        if !params.shares.is_empty() && params.shares.len() != n {
            return Err(format!("there are {} shares for {n} devices", params.shares.len()));
        }
        // An empty list means the CPU; a null pointer would mean every device there is.
        let used = devices.iter().filter(|device| !is_host(device)).map(Device::raw);
        let raw = used.chain([ptr::null_mut()]).collect();
        // SAFETY: no precondition.
        let n_read = unsafe { sys::llama_max_devices() };
        let mut shares: Vec<f32> = params.shares.iter().map(|&share| share as f32).collect();
        if !shares.is_empty() {
            shares.resize(n_read.max(n), 0.0);
        }
        Ok(Self { devices, raw, shares })
    }

    /// Whether the host computes all of it.
    pub fn is_host(&self) -> bool {
        self.raw.len() == 1
    }

    /// Tells llama.cpp, which reads both lists while it loads the model only.
    pub fn tell(&mut self, params: &mut sys::llama_model_params) {
        params.devices = self.raw.as_mut_ptr();
        params.split_mode = sys::LLAMA_SPLIT_MODE_LAYER;
        params.tensor_split = if self.shares.is_empty() { ptr::null() } else { self.shares.as_ptr() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::Backend;

    #[test]
    fn what_llama_cpp_would_abort_on_is_refused() {
        let cpu = Backend::init().device("cpu").expect("a CPU");
        let spread = |n: usize, shares: &[u32]| {
            let beside = vec![cpu.clone(); n - 1];
            let params = ModelParams { beside, shares: shares.to_vec(), ..ModelParams::default() };
            Spread::new(cpu.clone(), &params)
        };
        let host = spread(1, &[]).expect("the host alone");
        assert!(host.is_host() && host.devices.len() == 1 && host.shares.is_empty());
        for (n, shares, want) in [
            (MAX_DEVICES + 1, &[][..], "at most 14"),
            (2, &[], "the host is no device"),
            (1, &[1, 2], "2 shares for 1 devices"),
        ] {
            let why = spread(n, shares).err().expect("refused");
            assert!(why.contains(want), "{why}");
        }
    }
}
