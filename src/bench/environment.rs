//! What numbers were measured in: the machine, and what else it was doing.
//!
//! Never guesses: what can not be found out is null.

use std::{fmt::Write as _, fs};

use serde::{Deserialize, Serialize};

use super::Machine;

/// The machine, how its clock is governed, and its load.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// The machine.
    pub machine: Machine,
    /// How the first core's clock is governed, such as `performance`.
    pub governor: Option<String>,
    /// Programs that wanted a core in the last minute, on average, when the measurement began.
    pub load: Option<f64>,
    /// Read bandwidth of the cores that computed, in GB/s, measured in the same run.
    #[serde(default)]
    pub read_gb_per_s: Option<f64>,
}

impl Environment {
    /// This machine now. llama.cpp's version and the devices come from who loaded it.
    pub fn detect(llama_cpp: Option<String>, devices: Vec<String>) -> Self {
        let read = |path: &str| fs::read_to_string(path).ok();
        Self {
            machine: Machine::detect(llama_cpp, devices),
            governor: read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").map(|text| text.trim().to_owned()),
            load: read("/proc/loadavg").and_then(|text| text.split(' ').next()?.parse().ok()),
            read_gb_per_s: None,
        }
    }

    /// All of it in a sentence.
    pub fn sentence(&self) -> String {
        let Machine { cpu, cores, os, llama_cpp, features, .. } = &self.machine;
        let known = |value: Option<String>| value.unwrap_or_else(|| "unknown".to_owned());
        let mut text = format!(
            "Measured on {} ({} cores, {}), {os}, llama.cpp {}, governor {}, load {} at the start",
            known(cpu.clone()),
            known(cores.map(|n| n.to_string())),
            features.as_ref().map_or_else(|| "unknown instructions".to_owned(), |features| features.join(" ")),
            known(llama_cpp.clone()),
            known(self.governor.clone()),
            known(self.load.map(|load| load.to_string()))
        );
        if let Some(rate) = self.read_gb_per_s {
            let _ = write!(text, ", read bandwidth {rate:.1} GB/s");
        }
        text + "."
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_said_so() {
        let text = Environment::default().sentence();
        assert!(
            text.contains("Measured on unknown (unknown cores") && text.ends_with("load unknown at the start."),
            "{text}"
        );
        let here = Environment { read_gb_per_s: Some(9.96), ..Environment::detect(Some("1.2".into()), Vec::new()) };
        assert!(here.sentence().contains("llama.cpp 1.2") && here.sentence().ends_with("read bandwidth 10.0 GB/s."));
    }
}
