//! A configuration set step by step, and everything that is wrong with it at once.
//!
//! Never changes what was set: a value that can not work is reported, not mended.

use std::{error::Error, fmt, path::PathBuf, slice, str::FromStr};

use crate::{engine::EngineConfig, route::PolicyKind};

/// Everything that is wrong with a configuration, each in a sentence; at least one. Shown one a line.
///
/// ```
/// use eldr::EngineConfig;
///
/// let problems = EngineConfig::builder().decode("many").set(|config| config.n_slots = 0).build().unwrap_err();
/// assert_eq!(problems.len(), 2);
/// assert_eq!(problems.to_string().lines().count(), 2);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigProblems(Vec<String>);

impl ConfigProblems {
    /// Refuses a list that has something in it.
    fn check(problems: Vec<String>) -> Result<(), Self> {
        if problems.is_empty() { Ok(()) } else { Err(Self(problems)) }
    }

    /// How many there are.
    #[expect(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Each in turn.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.into_iter()
    }
}

impl<'a> IntoIterator for &'a ConfigProblems {
    type Item = &'a str;
    type IntoIter = std::iter::Map<slice::Iter<'a, String>, fn(&'a String) -> &'a str>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter().map(String::as_str)
    }
}

impl fmt::Display for ConfigProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl Error for ConfigProblems {}

/// Makes an [`EngineConfig`] from what a user wrote, and keeps every mistake until the end.
///
/// What is written as text has a method of its own; [`EngineBuilder::set`] sets the rest.
///
/// ```
/// use eldr::{EngineConfig, engine::EngineBuilder};
///
/// # fn main() -> Result<(), eldr::engine::ConfigProblems> {
/// let builder: EngineBuilder = EngineConfig::builder()
///     .decode("2@cuda:0,2@cuda:1")
///     .policy("marginal_cost")
///     .prefix_cache("512MiB")
///     .set(|config| config.n_slots = 32);
/// let config = builder.build()?; // or `.open("model.gguf")?` for an engine
/// assert_eq!(config.decode.n_workers(), 4);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "nothing is checked before `build`"]
pub struct EngineBuilder {
    config: EngineConfig,
    problems: Vec<String>,
}

impl EngineConfig {
    /// Sets a configuration step by step; all that is wrong with it is reported at once.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    /// Refuses a configuration with [`EngineConfig::problems`].
    pub fn check(&self) -> Result<(), ConfigProblems> {
        ConfigProblems::check(self.problems())
    }
}

impl EngineBuilder {
    /// The prefill workers, such as `1` or `2@cuda:0`.
    pub fn prefill(self, workers: &str) -> Self {
        self.parsed("prefill", workers, |config, list| config.prefill = list)
    }

    /// The decode workers, such as `8@cpu` or `2@cuda:0,2@cuda:1`.
    pub fn decode(self, workers: &str) -> Self {
        self.parsed("decode", workers, |config, list| config.decode = list)
    }

    /// The policy's name. One that is asked for by name is used whatever a calibration says of itself; `auto` heeds it.
    pub fn policy(self, name: &str) -> Self {
        self.parsed("policy", name, |config, kind| {
            config.policy = kind;
            config.heed_verdict = kind == PolicyKind::Auto;
        })
    }

    /// A calibration file, which must be there.
    pub fn calibration(mut self, path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        if !path.is_file() {
            self.problems
                .push(format!("calibration: there is no file {}; make one with `eldr calibrate`", path.display()));
        }
        self.config.calibration = Some(path);
        self
    }

    /// `auto`, `on` or `off`.
    pub fn flash_attention(self, word: &str) -> Self {
        self.parsed("flash_attention", word, |config, value| config.flash_attention = value)
    }

    /// What keys and values are stored as: `f16`, `q8_0` or `f32`.
    pub fn kv_format(self, name: &str) -> Self {
        self.parsed("kv_format", name, |config, value| config.kv_format = value)
    }

    /// What prefill workers keep of finished prompts: `on`, `off`, a number of tokens, or a size such as `512MiB`.
    pub fn prefix_cache(self, budget: &str) -> Self {
        self.parsed("prefix_cache", budget, |config, value| config.prefix_cache = value)
    }

    /// Sets any other field.
    pub fn set(mut self, set: impl FnOnce(&mut EngineConfig)) -> Self {
        set(&mut self.config);
        self
    }

    /// The configuration.
    ///
    /// # Errors
    /// Every text that could not be read, and every number that can not work.
    pub fn build(mut self) -> Result<EngineConfig, ConfigProblems> {
        self.problems.extend(self.config.problems());
        ConfigProblems::check(self.problems)?;
        Ok(self.config)
    }

    /// Loads a model and starts an engine as configured.
    ///
    /// # Errors
    /// Every mistake at once, a missing model and unknown devices among them; then what loading found.
    #[cfg(feature = "llama")]
    pub fn open(
        mut self,
        model: impl AsRef<std::path::Path>,
    ) -> Result<crate::engine::Engine, crate::engine::EngineError> {
        let model = model.as_ref();
        self.note_model(model);
        let config = &self.config;
        let specs = config.prefill.0.iter().chain(&config.decode.0);
        let mut devices: Vec<&str> = specs.flat_map(super::WorkerSpec::device_names).collect();
        devices.sort_unstable();
        devices.dedup();
        let wrong = devices.iter().filter_map(|name| crate::engine::sharing::named(name, config.rpc_deadline).err());
        self.problems.extend(wrong.map(|error| error.to_string()));
        crate::engine::Engine::open(model, &self.build()?)
    }

    /// Notes a model that is not there.
    #[cfg(any(feature = "llama", test))]
    fn note_model(&mut self, model: &std::path::Path) {
        if !model.is_file() {
            self.problems.push(format!("model: there is no file {}; give the path of a GGUF file", model.display()));
        }
    }

    fn parsed<T: FromStr<Err: fmt::Display>>(
        mut self,
        what: &str,
        text: &str,
        set: impl FnOnce(&mut EngineConfig, T),
    ) -> Self {
        match text.parse() {
            Ok(value) => set(&mut self.config, value),
            Err(error) => self.problems.push(format!("{what}: {error}")),
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{FlashAttention, KvFormat, PrefixBudget, WorkerList};

    #[test]
    fn nothing_set_is_the_default_and_each_setter_sets_its_field() {
        assert_eq!(EngineConfig::builder().build(), Ok(EngineConfig::default()));
        let file = tempfile::NamedTempFile::new().expect("a file");
        let config = EngineConfig::builder()
            .prefill("2")
            .decode("8@cpu")
            .policy("round_robin")
            .calibration(file.path())
            .flash_attention("on")
            .kv_format("q8_0")
            .prefix_cache("off")
            .set(|config| config.seed = 7)
            .build();
        let want = EngineConfig {
            prefill: WorkerList::best(2),
            decode: "8@cpu".parse().expect("valid"),
            policy: PolicyKind::RoundRobin,
            heed_verdict: false,
            calibration: Some(file.path().to_owned()),
            flash_attention: FlashAttention::On,
            kv_format: KvFormat::Q8_0,
            prefix_cache: PrefixBudget::Off,
            seed: 7,
            ..EngineConfig::default()
        };
        assert_eq!(config, Ok(want));
        assert!(EngineConfig::builder().policy("auto").build().expect("valid").heed_verdict);
    }

    #[test]
    fn every_mistake_is_told_in_a_line_of_its_own() {
        let mut builder = EngineConfig::builder()
            .prefill("none")
            .decode("2@")
            .policy("fastest")
            .calibration("no/such/file")
            .flash_attention("maybe")
            .kv_format("f8")
            .prefix_cache("much")
            .set(|config| config.n_slots = 0)
            .set(|config| config.chunk = 0);
        builder.note_model(std::path::Path::new("no/such/model.gguf"));
        let problems = builder.build().expect_err("ten mistakes");
        let starts = [
            "prefill: 'none'",
            "decode: '2@'",
            "policy: unknown policy 'fastest'",
            "calibration: there is no file no/such/file",
            "flash_attention: 'maybe'",
            "kv_format: 'f8'",
            "prefix_cache: 'much'",
            "model: there is no file no/such/model.gguf",
            "slots must be",
            "the prefill chunk",
        ];
        assert_eq!(problems.len(), starts.len(), "{problems}");
        for ((line, problem), start) in problems.to_string().lines().zip(&problems).zip(starts) {
            assert!(line == problem && line.starts_with(start), "{line}");
        }
    }
}
