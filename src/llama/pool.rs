//! A context's own CPU threads, and where the calling thread and its memory are.
//!
//! Never chooses processors; it is told them.

use llama_cpp_sys_2 as sys;

use super::guard;
use crate::types::CpuSet;

/// Threads that belong to one context. To be dropped after it.
pub(super) struct Pool(sys::ggml_threadpool_t);

// SAFETY: ggml ties a pool to no thread; only its context uses it.
unsafe impl Send for Pool {}

impl Pool {
    /// Starts `n_threads` on `cpus` and lets the context compute with them; the thread that runs its first batch is
    /// pinned there too.
    ///
    /// # Safety
    /// The context is open, and freed before the pool.
    pub unsafe fn attach(ctx: *mut sys::llama_context, cpus: &CpuSet, n_threads: u32) -> Result<Self, String> {
        let mut pool = std::ptr::null_mut();
        let cpus = cpus.cpus();
        // SAFETY: the context is open, as the caller promises, and the processors outlive the call.
        guard::call(|message, size| unsafe {
            let n_threads = n_threads.cast_signed();
            guard::eldr_guard_threads_attach(ctx, cpus.as_ptr(), cpus.len(), n_threads, &raw mut pool, message, size)
        })
        .map_err(|e| {
            if e.is_no_backend() { "this build of ggml has no thread pools".to_owned() } else { e.to_string() }
        })?;
        Ok(Self(pool))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: made by `attach`; its context is freed, as the caller of `attach` promised.
        unsafe { guard::eldr_guard_threads_free(self.0) };
    }
}

/// Pins the calling thread to processors; why not, in a sentence.
#[cfg(target_os = "linux")]
pub fn pin_thread(cpus: &CpuSet) -> Result<(), String> {
    // SAFETY: all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus.cpus() {
        // SAFETY: writes inside the set; a number beyond it is ignored.
        unsafe { libc::CPU_SET(cpu as usize, &mut set) };
    }
    // SAFETY: the set is as long as said, and outlives the call.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(format!("a thread can not be pinned to processors {cpus}: {}", std::io::Error::last_os_error())),
    }
}

/// Pins the calling thread to processors; only Linux can.
#[cfg(not(target_os = "linux"))]
pub fn pin_thread(cpus: &CpuSet) -> Result<(), String> {
    Err(format!("workers can be pinned to processors on Linux only, not to {cpus} here"))
}

/// From now on memory that the calling thread touches first is on this NUMA node while that has any; why not, in a
/// sentence.
#[cfg(target_os = "linux")]
pub fn prefer_memory_of(node: u32) -> Result<(), String> {
    // MPOL_PREFERRED of linux/mempolicy.h, which libc does not name on every target.
    const PREFERRED: libc::c_long = 1;
    let mut mask = [0u64; 16];
    let Some(word) = mask.get_mut(node as usize / 64) else { return Err(format!("there is no NUMA node {node}")) };
    *word |= 1 << (node % 64);
    let n_bits = libc::c_long::from(u16::try_from(64 * mask.len()).expect("small"));
    // SAFETY: the mask has as many bits as said, and outlives the call, which changes only this thread's policy.
    match unsafe { libc::syscall(libc::SYS_set_mempolicy, PREFERRED, mask.as_ptr(), n_bits) } {
        0 => Ok(()),
        _ => Err(format!("memory can not be bound to NUMA node {node}: {}", std::io::Error::last_os_error())),
    }
}

/// Binds memory; only Linux can.
#[cfg(not(target_os = "linux"))]
pub fn prefer_memory_of(node: u32) -> Result<(), String> {
    Err(format!("memory can be bound to NUMA nodes on Linux only, not to {node} here"))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::{fs, thread, time::Duration};

    use super::*;
    use crate::llama::{Context, ContextParams, testing::model};

    /// Threads of this process that may run on these processors only, as the system tells.
    fn n_pinned(cpus: &str) -> usize {
        let tasks = fs::read_dir("/proc/self/task").expect("Linux");
        let status = |task: fs::DirEntry| fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let is_there = |status: &String| {
            status.lines().any(|line| line.strip_prefix("Cpus_allowed_list:").is_some_and(|list| list.trim() == cpus))
        };
        tasks.filter_map(Result::ok).map(status).filter(is_there).count()
    }

    #[test]
    fn a_contexts_threads_are_where_they_were_told_to_be_and_end_with_it() {
        let last = crate::llama::testing::last_cpu();
        let only = CpuSet::new([last]);
        if n_pinned(&only.to_string()) > 0 {
            // One processor in all: everything is pinned to it already.
            return;
        }
        let params = ContextParams { n_ctx_slot: 256, n_threads: 3, cpus: only.clone(), ..ContextParams::default() };
        let context = Context::new(model(), &params).expect("a context");
        // The third is whoever runs the first batch.
        let await_pinned = |n: usize| {
            (0..200).any(|_| {
                thread::sleep(Duration::from_millis(20));
                n_pinned(&only.to_string()) == n
            })
        };
        assert!(await_pinned(2), "{} are pinned", n_pinned(&only.to_string()));
        drop(context);
        assert!(await_pinned(0), "{} are left", n_pinned(&only.to_string()));
    }
}
