//! llama.cpp in this process: started once, its log forwarded, its devices listed.
//!
//! Never frees llama.cpp: a host program may be using it too.

use std::{
    ffi::CString,
    fmt::Write,
    ptr,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use llama_cpp_sys_2 as sys;

use super::{
    device::{self, Device, DeviceInfo, DeviceKind},
    error::LlamaError,
    guard,
    libraries::{self, UnusableLibrary},
    logging,
    rpc::{RpcFailure, Session},
};

// llama.cpp itself is one per process: its logger, its device registry and its CPU tables are C globals.
// What was started holds the libraries that were found and are of no use.
static START: OnceLock<Vec<UnusableLibrary>> = OnceLock::new();
static REGISTRY: Mutex<Vec<Remote>> = Mutex::new(Vec::new());

/// Most devices of one server that are used.
const MAX_REMOTE: usize = 64;

/// A server's devices, and the relay in front of it.
struct Remote {
    session: Arc<Session>,
    devices: Vec<RawDevice>,
}

#[derive(Clone, Copy)]
struct RawDevice(sys::ggml_backend_dev_t);

// SAFETY: ggml keeps a device of an RPC server, unchanged, for as long as the process lives.
unsafe impl Send for RawDevice {}

/// A token that llama.cpp is running in this process.
#[derive(Debug, Clone)]
pub struct Backend {
    _started: (),
}

impl Backend {
    /// Starts llama.cpp on the first call; every call gives an equal token.
    ///
    /// llama.cpp's log goes to the `log` crate under the target `llama.cpp`: its errors as warnings (they are also in
    /// the error returned), its warnings as info, the rest below. The text of a failed assert is logged as an error.
    pub fn init() -> Self {
        START.get_or_init(|| {
            logging::install();
            // Before llama.cpp, which loads them itself if there are none yet.
            let unusable = libraries::load_all();
            // SAFETY: may be called again after a host program has; it sets up time and tables.
            unsafe { sys::llama_backend_init() };
            unusable
        });
        Self { _started: () }
    }

    /// The libraries of ggml backends that were where this build looks for them when it started, and give no device. None
    /// in a build that loads no libraries.
    pub fn unusable_libraries(&self) -> &'static [UnusableLibrary] {
        START.get().map_or(&[], Vec::as_slice)
    }

    /// The devices of this machine and build, in ggml's order.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        self.all().iter().map(Device::info).collect()
    }

    /// The device with this ggml name, in any case and with or without a colon (`cpu`, `CUDA0`, `cuda:0`, `rpc1`), or
    /// with this index in [`Backend::devices`]; `rpc:HOST:PORT` is the first device of that RPC server, once
    /// [`Backend::add_rpc`] has made it known.
    pub fn device(&self, spec: &str) -> Result<Device, LlamaError> {
        let all = self.all();
        let found = match rpc_endpoint(spec) {
            Some(endpoint) => all.iter().find(|device| device.endpoint() == Some(endpoint)),
            None => device::find(&all, spec),
        };
        found.cloned().ok_or_else(|| {
            if !all.iter().any(|device| device.kind() == DeviceKind::Cpu) {
                return no_cpu();
            }
            let mut known = all.iter().map(Device::name).collect::<Vec<_>>().join(", ");
            for UnusableLibrary { path, reason } in self.unusable_libraries() {
                let _ = write!(known, "; {} cannot be used: {reason}", path.display());
            }
            LlamaError::UnknownDevice { spec: spec.to_owned(), known }
        })
    }

    /// The first GPU of this machine, else a remote or integrated one, else the CPU. Without a CPU device, which only a
    /// build that loads libraries can lack, nothing can be computed, and that is the error.
    pub fn best_device(&self) -> Result<Device, LlamaError> {
        let all = self.all();
        let rank = |d: &Device| match d.kind() {
            DeviceKind::Gpu => 0,
            DeviceKind::Rpc => 1,
            DeviceKind::IntegratedGpu => 2,
            DeviceKind::Cpu => 3,
            DeviceKind::Accelerator => 4,
        };
        if !all.iter().any(|device| device.kind() == DeviceKind::Cpu) {
            return Err(no_cpu());
        }
        Ok(all.iter().min_by_key(|&d| rank(d)).cloned().expect("at least the CPU"))
    }

    /// Every RPC device, then every GPU of this machine, or the integrated ones where it has no other: what llama.cpp
    /// divides a model over unless it is told. The CPU where there is none of these; errors as [`Backend::best_device`].
    pub fn all_devices(&self) -> Result<Vec<Device>, LlamaError> {
        let all = self.all();
        let of = |kind: DeviceKind| all.iter().filter(move |device| device.kind() == kind).cloned();
        let mut found: Vec<Device> = of(DeviceKind::Rpc).collect();
        let mut known = Vec::new();
        // A GPU that two backends drive is one device.
        found.extend(of(DeviceKind::Gpu).filter(|device| match device.hardware() {
            Some(hardware) if known.contains(&hardware) => false,
            hardware => {
                known.extend(hardware);
                true
            }
        }));
        if !found.iter().any(|device| device.kind() == DeviceKind::Gpu) {
            found.extend(of(DeviceKind::IntegratedGpu).take(1));
        }
        if found.is_empty() { self.best_device().map(|best| vec![best]) } else { Ok(found) }
    }

    /// The devices of the RPC server at `host:port`, at least one. A server that has failed since is asked anew, and its
    /// devices are others then; those that failed stay so.
    ///
    /// `deadline` is the longest the server may keep a byte waiting before it has failed ([`Device::failure`]); the
    /// process and its other devices go on then. Errors: the build has no RPC backend, or no RPC server answers there.
    pub fn add_rpc(&self, endpoint: &str, deadline: Duration) -> Result<Vec<Device>, LlamaError> {
        let rpc = |reason: String| LlamaError::Rpc { endpoint: endpoint.to_owned(), reason };
        parse_endpoint(endpoint).map_err(&rpc)?;
        let known = self.remote_devices(endpoint);
        if !known.is_empty() {
            return Ok(known);
        }
        if !has_rpc() {
            return Err(LlamaError::NoRpc);
        }
        // Not under the lock: a server may take its time.
        let session = Session::open(endpoint, deadline).map_err(|failure| match failure {
            RpcFailure::Silent { .. } => LlamaError::RpcSilent { endpoint: endpoint.to_owned(), deadline },
            failure => rpc(failure.to_string()),
        })?;
        let session = Arc::new(session);
        {
            let mut registry = lock();
            if !registry.iter().any(|remote| is_well(remote, endpoint)) {
                let devices = register(&session).map_err(&rpc)?;
                registry.retain(|remote| remote.session.endpoint() != endpoint);
                registry.push(Remote { session, devices });
            }
        }
        let devices = self.remote_devices(endpoint);
        if devices.is_empty() { Err(rpc("the server failed at once".to_owned())) } else { Ok(devices) }
    }

    /// The device in the place of a remote one that failed, if its server is back.
    pub fn renewed(&self, device: &Device, deadline: Duration) -> Result<Device, LlamaError> {
        let Some(endpoint) = device.endpoint() else { return Ok(device.clone()) };
        let reason = || "the server is back with fewer devices".to_owned();
        let found = self.add_rpc(endpoint, deadline)?.into_iter().nth(device.ordinal());
        found.ok_or_else(|| LlamaError::Rpc { endpoint: endpoint.to_owned(), reason: reason() })
    }

    fn remote_devices(&self, endpoint: &str) -> Vec<Device> {
        self.all().into_iter().filter(|d| d.endpoint() == Some(endpoint)).collect()
    }

    /// Serves `device` to other processes over RPC with `n_threads` CPU threads, until the process ends.
    ///
    /// Returns only with an error. There is no authentication: bind to loopback or a trusted network.
    pub fn serve_rpc(&self, endpoint: &str, device: &Device, n_threads: u32) -> Result<(), LlamaError> {
        let text = CString::new(endpoint).map_err(|_| LlamaError::Nul { what: "the RPC endpoint" })?;
        let rpc = |reason: String| LlamaError::Rpc { endpoint: endpoint.to_owned(), reason };
        parse_endpoint(endpoint).map_err(&rpc)?;
        // SAFETY: the endpoint is a C string and the device is registered for as long as the process lives.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_rpc_serve(text.as_ptr(), n_threads as usize, device.raw(), message, size)
        })
        .map_err(|e| if e.is_no_backend() { LlamaError::NoRpc } else { rpc(e.to_string()) })?;
        Err(rpc("the server stopped: is the port free?".to_owned()))
    }

    /// The version of llama.cpp and of ggml in this build.
    pub fn version(&self) -> String {
        // SAFETY: no precondition.
        let llama = unsafe { sys::llama_version() };
        // SAFETY: llama.cpp returns a static C string.
        let llama = unsafe { guard::text(llama) };
        // SAFETY: no precondition.
        let ggml = unsafe { sys::ggml_version() };
        // SAFETY: ggml returns a static C string.
        let ggml = unsafe { guard::text(ggml) };
        format!("llama.cpp {llama}, ggml {ggml}")
    }

    /// The instruction sets and features each backend was built with, as llama.cpp prints them.
    pub fn system_info(&self) -> String {
        let _lock = lock();
        // SAFETY: writes a static buffer, and REGISTRY keeps other threads of ours out.
        let text = unsafe { sys::llama_print_system_info() };
        // SAFETY: a C string in that buffer, copied under the same lock.
        let text = unsafe { guard::text(text) };
        text.trim().trim_end_matches('|').trim().to_owned()
    }

    /// The CPU computes a forward pass of one token by other kernels than one of several (`GGML_LLAMAFILE`), so that a
    /// sequence alone in its batch, or its prompt run again instead of its tokens one by one, gives logits that are
    /// close but not equal to the bit.
    pub fn single_token_differs(&self) -> bool {
        self.system_info().contains("LLAMAFILE = 1")
    }

    fn all(&self) -> Vec<Device> {
        let registry = lock();
        let mut all = device::all(self);
        for Remote { session, devices } in registry.iter().filter(|remote| remote.session.failure().is_none()) {
            for (ordinal, device) in devices.iter().enumerate() {
                all.push(device::open(self, device.0, all.len(), Some((Arc::clone(session), ordinal))));
            }
        }
        all
    }
}

fn lock() -> std::sync::MutexGuard<'static, Vec<Remote>> {
    REGISTRY.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn is_well(remote: &Remote, endpoint: &str) -> bool {
    remote.session.endpoint() == endpoint && remote.session.failure().is_none()
}

fn has_rpc() -> bool {
    // SAFETY: the name is a C string; looks into the registry.
    !unsafe { sys::ggml_backend_reg_by_name(c"RPC".as_ptr()) }.is_null()
}

/// Lets ggml's client connect to a relay. The caller holds the registry's lock.
fn register(session: &Session) -> Result<Vec<RawDevice>, String> {
    let text = CString::new(session.relay()).expect("an address");
    let mut raw = [ptr::null_mut(); MAX_REMOTE];
    let mut n_devices = 0;
    logging::clear_errors();
    // SAFETY: the endpoint is a C string, the places outlive the call, and the registry's lock is held.
    guard::call(|message, size| unsafe {
        guard::eldr_guard_rpc_add(text.as_ptr(), raw.as_mut_ptr(), raw.len(), &raw mut n_devices, message, size)
    })
    .map_err(|e| e.to_string())?;
    match session.failure() {
        Some(reason) => Err(reason.to_owned()),
        None if n_devices == 0 => Err(format!("the server offers no device: {}", logging::take_reason())),
        None => Ok(raw.iter().take(n_devices).map(|&device| RawDevice(device)).collect()),
    }
}

fn no_cpu() -> LlamaError {
    LlamaError::NoCpu { places: libraries::places() }
}

fn parse_endpoint(endpoint: &str) -> Result<(), String> {
    match endpoint.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0) => Ok(()),
        _ => Err("an endpoint is HOST:PORT, such as 127.0.0.1:50052".to_owned()),
    }
}

/// The `HOST:PORT` of `rpc:HOST:PORT`; none for `rpc:1`, which is a device's name.
pub fn rpc_endpoint(spec: &str) -> Option<&str> {
    let (kind, rest) = spec.trim().split_once(':')?;
    (kind.eq_ignore_ascii_case("rpc") && rest.contains(':')).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_build_has_a_cpu_found_by_name_and_index() {
        let backend = Backend::init();
        let cpu = backend.device("cpu").expect("a CPU device");
        assert_eq!(cpu.kind(), DeviceKind::Cpu);
        assert_eq!(backend.device("CPU").expect("in any case"), cpu);
        assert_eq!(backend.device(&cpu.index().to_string()).expect("by index"), cpu);
        assert!(backend.devices()[cpu.index()].total_bytes > 0);
    }

    #[test]
    fn all_devices_are_some_and_each_once() {
        let all = Backend::init().all_devices().expect("a CPU");
        assert!(!all.is_empty());
        assert!(all.iter().enumerate().all(|(at, device)| !all[..at].contains(device)), "{all:?}");
    }

    #[test]
    fn an_unknown_device_is_answered_with_the_known_ones() {
        let error = Backend::init().device("cuda:99").expect_err("no such device").to_string();
        assert!(error.contains("\"cuda:99\"") && error.contains("CPU"), "{error}");
    }

    #[test]
    fn a_malformed_or_silent_endpoint_is_an_error_and_not_an_abort() {
        let backend = Backend::init();
        let add = |endpoint: &str| backend.add_rpc(endpoint, Duration::from_millis(200));
        for endpoint in ["localhost", ":1", "127.0.0.1:0", "127.0.0.1:port"] {
            assert!(matches!(add(endpoint), Err(LlamaError::Rpc { .. })), "{endpoint}");
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = listener.local_addr().expect("its address").to_string();
        if has_rpc() {
            let silent = add(&endpoint).expect_err("nobody answers");
            assert!(matches!(silent, LlamaError::RpcSilent { .. }), "{silent}");
            let text = silent.to_string();
            assert!(text.contains("within 0.2 s") && text.contains("a server of its own"), "{text}");
        }
        drop(listener);
        assert!(matches!(add(&endpoint), Err(LlamaError::Rpc { .. } | LlamaError::NoRpc)));
    }

    // Symptom: looking a device up connected to its server, with a deadline nobody had set.
    #[test]
    fn a_server_is_looked_up_only_once_it_was_added() {
        let error = Backend::init().device("rpc:127.0.0.1:1").expect_err("not added").to_string();
        assert!(error.contains("\"rpc:127.0.0.1:1\"") && error.contains("CPU"), "{error}");
    }

    #[test]
    fn the_version_is_the_pinned_one() {
        assert_eq!(Backend::init().version(), "llama.cpp 0.6.0-dev, ggml 0.26.0");
    }
}
