//! A ggml device: what it is called, what it is, how much memory it has.
//!
//! Never chooses one; [`Backend`] and its callers do.

use std::{fmt, mem::MaybeUninit, sync::Arc, time::Duration};

use llama_cpp_sys_2 as sys;

use super::{backend::Backend, guard, rpc::Session};

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The host's processors and memory.
    Cpu,
    /// A GPU with its own memory.
    Gpu,
    /// A GPU that shares the host's memory.
    IntegratedGpu,
    /// A device of another process, over RPC.
    Rpc,
    /// A helper of the CPU, such as BLAS.
    Accelerator,
}

/// What a device reports about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Position in [`Backend::devices`].
    pub index: usize,
    /// ggml's name, such as `CUDA0`.
    pub name: String,
    /// The product's name, or an RPC endpoint.
    pub description: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Free memory, in bytes; the CPU reports all of it.
    pub free_bytes: u64,
    /// Memory, in bytes.
    pub total_bytes: u64,
}

/// A device a model can be loaded on.
#[derive(Clone)]
pub struct Device {
    raw: sys::ggml_backend_dev_t,
    index: usize,
    kind: DeviceKind,
    name: Arc<str>,
    description: Arc<str>,
    session: Option<Arc<Session>>,
    /// Which of its server's devices.
    ordinal: usize,
    _backend: Backend,
}

// SAFETY: ggml keeps a registered device, unchanged, for as long as the process lives.
unsafe impl Send for Device {}
// SAFETY: as above; its functions only read.
unsafe impl Sync for Device {}

impl Device {
    /// ggml's name, such as `CUDA0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The product's name, or an RPC endpoint.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// What it is.
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Position in [`Backend::devices`].
    pub fn index(&self) -> usize {
        self.index
    }

    /// What it reports now, its free memory included.
    pub fn info(&self) -> DeviceInfo {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the device is registered for as long as the process lives, and both places outlive the call.
        unsafe { sys::ggml_backend_dev_memory(self.raw, &raw mut free, &raw mut total) };
        DeviceInfo {
            index: self.index,
            name: self.name.to_string(),
            description: self.description.to_string(),
            kind: self.kind,
            free_bytes: free as u64,
            total_bytes: total as u64,
        }
    }

    /// The RPC server's `host:port`; none for a device of this machine.
    pub fn endpoint(&self) -> Option<&str> {
        self.session.as_deref().map(Session::endpoint)
    }

    /// Why nothing computed on a remote device since can be used, and nothing will be; none while all is well. Another
    /// [`Backend::add_rpc`] makes a new device of a server that is back.
    pub fn failure(&self) -> Option<&str> {
        self.session.as_deref().and_then(Session::failure)
    }

    /// The longest a remote device may keep a byte waiting before it has failed.
    pub fn set_deadline(&self, deadline: Duration) {
        self.session.iter().for_each(|session| session.set_deadline(deadline));
    }

    /// The system's name for the hardware, such as a place on the PCI bus: equal for one device that two backends drive.
    pub(super) fn hardware(&self) -> Option<String> {
        let mut props = MaybeUninit::<sys::ggml_backend_dev_props>::zeroed();
        // SAFETY: the device is registered, and the place outlives the call.
        unsafe { sys::ggml_backend_dev_get_props(self.raw, props.as_mut_ptr()) };
        // SAFETY: of numbers and pointers, all of which may be zero.
        let props = unsafe { props.assume_init() };
        // SAFETY: a C string the device owns.
        (!props.device_id.is_null()).then(|| unsafe { guard::text(props.device_id) })
    }

    /// Which of its server's devices it is.
    pub(super) fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub(super) fn raw(&self) -> sys::ggml_backend_dev_t {
        self.raw
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}, {:?})", self.name, self.kind)
    }
}

/// Why what is computed on these devices together can not be used any more; none while all are well.
pub fn failure_of(devices: &[Device]) -> Option<String> {
    let (device, reason) = devices.iter().find_map(|device| Some((device, device.failure()?)))?;
    Some(match device.endpoint() {
        Some(endpoint) if devices.len() > 1 => format!("{endpoint}: {reason}"),
        _ => reason.to_owned(),
    })
}

/// All registered devices. The caller keeps registrations out.
pub(super) fn all(backend: &Backend) -> Vec<Device> {
    // SAFETY: reads the registry.
    let n = unsafe { sys::ggml_backend_dev_count() };
    let registered = (0..n).map(|index| {
        // SAFETY: the index is below the device count.
        let raw = unsafe { sys::ggml_backend_dev_get(index) };
        open(backend, raw, index, None)
    });
    registered.collect()
}

/// A device of the registry, or one of a remote server.
pub(super) fn open(
    backend: &Backend,
    raw: sys::ggml_backend_dev_t,
    index: usize,
    session: Option<(Arc<Session>, usize)>,
) -> Device {
    let name = name(raw);
    // SAFETY: the device is registered.
    let description = unsafe { sys::ggml_backend_dev_description(raw) };
    // SAFETY: a C string the device owns.
    let mut description = unsafe { guard::text(description) };
    if let Some((session, _)) = &session {
        session.endpoint().clone_into(&mut description);
    }
    Device {
        raw,
        index,
        kind: kind(raw),
        name: name.into(),
        description: description.into(),
        ordinal: session.as_ref().map_or(0, |(_, ordinal)| *ordinal),
        session: session.map(|(session, _)| session),
        _backend: backend.clone(),
    }
}

/// The name of a device that ggml handed out, which lives as long as the process.
pub(super) fn name(raw: sys::ggml_backend_dev_t) -> String {
    // SAFETY: the device lives.
    let name = unsafe { sys::ggml_backend_dev_name(raw) };
    // SAFETY: a C string the device owns.
    unsafe { guard::text(name) }
}

fn kind(raw: sys::ggml_backend_dev_t) -> DeviceKind {
    // SAFETY: the device is registered.
    let type_ = unsafe { sys::ggml_backend_dev_type(raw) };
    match type_ {
        sys::GGML_BACKEND_DEVICE_TYPE_CPU => DeviceKind::Cpu,
        sys::GGML_BACKEND_DEVICE_TYPE_GPU if is_rpc(raw) => DeviceKind::Rpc,
        sys::GGML_BACKEND_DEVICE_TYPE_GPU => DeviceKind::Gpu,
        sys::GGML_BACKEND_DEVICE_TYPE_IGPU => DeviceKind::IntegratedGpu,
        _ => DeviceKind::Accelerator,
    }
}

fn is_rpc(raw: sys::ggml_backend_dev_t) -> bool {
    // SAFETY: the device is registered.
    let reg = unsafe { sys::ggml_backend_dev_backend_reg(raw) };
    // SAFETY: a registered device has a registry.
    let name = unsafe { sys::ggml_backend_reg_name(reg) };
    // SAFETY: a C string the registry owns.
    unsafe { guard::text(name) }.starts_with("RPC")
}

/// Whether `spec` is this device's name (any case, colon or not) or index.
pub fn is_named(device: &DeviceInfo, spec: &str) -> bool {
    normal(&device.name) == normal(spec) || spec.trim().parse() == Ok(device.index)
}

/// The device with this name (any case, colon or not) or index.
pub(super) fn find<'a>(all: &'a [Device], spec: &str) -> Option<&'a Device> {
    let wanted = normal(spec);
    all.iter()
        .find(|d| normal(&d.name) == wanted)
        .or_else(|| spec.trim().parse::<usize>().ok().and_then(|index| all.get(index)))
}

fn normal(name: &str) -> String {
    name.trim().chars().filter(|&c| c != ':').map(|c| c.to_ascii_lowercase()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_compare_without_case_and_colon() {
        assert_eq!(normal("cuda:0"), normal("CUDA0"));
        assert_eq!(normal(" rpc1 "), "rpc1");
        assert_ne!(normal("cuda1"), normal("cuda0"));
    }
}
