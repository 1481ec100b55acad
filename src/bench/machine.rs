use std::{env::consts, fs, num::NonZero, thread};

use serde::{Deserialize, Serialize};

/// CPU features that change how fast llama.cpp's kernels are, as `/proc/cpuinfo` spells them.
const FEATURES: [&str; 18] = [
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
];

/// What a bench ran on. What could not be found out is null.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The CPU's name.
    pub cpu: Option<String>,
    /// Logical cores this process may use.
    pub cores: Option<usize>,
    /// Main memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Operating system and its kernel's release.
    pub os: String,
    /// Instruction set, such as `x86_64`.
    pub arch: String,
    /// llama.cpp's version.
    pub llama_cpp: Option<String>,
    /// The ggml devices the workers ran on.
    #[serde(default)]
    pub devices: Vec<String>,
    /// CPU features that matter to llama.cpp's kernels.
    pub features: Option<Vec<String>>,
}

impl Machine {
    /// This machine. llama.cpp's version and the devices come from who loaded it.
    pub fn detect(llama_cpp: Option<String>, devices: Vec<String>) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let release = read("/proc/sys/kernel/osrelease");
        Self {
            cpu: field(&cpuinfo, "model name").map(str::to_owned),
            cores: thread::available_parallelism().ok().map(NonZero::get),
            memory_bytes: field(&read("/proc/meminfo"), "MemTotal").and_then(kilobytes),
            os: format!("{} {}", consts::OS, release.trim()).trim_end().to_owned(),
            arch: consts::ARCH.to_owned(),
            llama_cpp,
            devices,
            features: features(&cpuinfo),
        }
    }
}

/// The value of the first line `key : value`.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let values = text.lines().filter_map(|line| line.split_once(':'));
    values.into_iter().find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
}

/// Bytes of a size such as `16384 kB`.
fn kilobytes(size: &str) -> Option<u64> {
    size.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Those of [`FEATURES`] that the CPU has.
fn features(cpuinfo: &str) -> Option<Vec<String>> {
    let flags: Vec<&str> = field(cpuinfo, "flags").or_else(|| field(cpuinfo, "Features"))?.split_whitespace().collect();
    Some(FEATURES.iter().filter(|name| flags.contains(name)).map(ToString::to_string).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read() {
        let intel =
            "processor\t: 0\nmodel name\t: A CPU @ 2.0GHz\nflags\t\t: fpu sse4_2 avx2 fma avx\n\nprocessor\t: 1\n";
        assert_eq!(field(intel, "model name"), Some("A CPU @ 2.0GHz"));
        assert_eq!(features(intel), Some(["sse4_2", "avx", "avx2", "fma"].map(String::from).to_vec()));
        assert_eq!(features("Features\t: fp asimd bf16\n"), Some(vec!["asimd".into(), "bf16".into()]));
        assert_eq!((features(""), field("", "model name")), (None, None));
        assert_eq!((kilobytes("2 kB"), kilobytes("2 MB"), kilobytes("x kB")), (Some(2048), None, None));
    }

    #[test]
    fn unknown_facts_are_null_and_passed_ones_kept() {
        let here = Machine::detect(Some("1.2".into()), vec!["CPU".into()]);
        let json = serde_json::to_value(&here).expect("json");
        assert_eq!((&json["llama_cpp"], &json["devices"][0]), (&"1.2".into(), &"CPU".into()));
        assert!(here.os.starts_with(consts::OS) && here.cores.is_some_and(|n| n > 0));
        let nowhere = serde_json::to_value(Machine::default()).expect("json");
        assert!(nowhere["cpu"].is_null() && nowhere["features"].is_null() && nowhere["llama_cpp"].is_null());
    }
}
