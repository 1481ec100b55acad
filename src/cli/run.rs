//! `eldr run`: one prompt, its answer as it is drawn.
//!
//! Never keeps anything from one call to the next.

use std::{
    io::{self, Read as _},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use eldr::{
    engine::{Engine, EngineConfig, LoadedModel, StreamEvent, TokenStream, WorkerList},
    route::Decision,
    types::{FinishReason, Request, SamplingParams, Token, Usage},
};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{
    answering::AnswerArgs,
    args::switch,
    error::CliError,
    output::{Output, end_now},
    usage,
};

#[derive(Debug, Args)]
pub struct RunArgs {
    /// The prompt; - reads it from standard input
    prompt: String,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// Tokens to generate at most
    #[arg(short, long, visible_alias = "max-tokens", value_name = "N", default_value_t = 64)]
    n_predict: u32,
    /// Wrap the prompt in the model's chat template
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    chat: Option<bool>,
    /// System message for --chat
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Seconds the answer may take
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<f64>,
    #[command(flatten)]
    answer: AnswerArgs,
}

/// Seconds of a deadline at most, thirty years; clocks count on for longer.
const LONGEST: f64 = 1e9;

/// How tokens are chosen.
#[derive(Debug, Args)]
struct SamplingArgs {
    /// 0 takes the likeliest token
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Keep the K likeliest tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Keep the likeliest tokens that together reach P
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Drop tokens less likely than this share of the likeliest
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Divide the logits of recent tokens by this
    #[arg(long, value_name = "X")]
    repeat_penalty: Option<f32>,
    /// Lower a token's logit by this for each time it occurred
    #[arg(long, value_name = "X")]
    frequency_penalty: Option<f32>,
    /// Lower a token's logit by this when it occurred
    #[arg(long, value_name = "X")]
    presence_penalty: Option<f32>,
    /// Tokens the penalties look back at
    #[arg(long, value_name = "N")]
    repeat_last_n: Option<u32>,
    /// Seed of the draws
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
    /// Go on after an end-of-text token
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    ignore_eos: Option<bool>,
}

impl SamplingArgs {
    /// Refuses, by the options' names, what the engine would refuse by its own.
    fn check(&self) -> Result<(), CliError> {
        let share = |share: f64| (0.0..=1.0).contains(&share);
        usage::temperature(self.temperature)?;
        usage::must("--top-p", self.top_p, share, "between 0 and 1")?;
        usage::must("--min-p", self.min_p, share, "between 0 and 1")?;
        usage::must("--repeat-penalty", self.repeat_penalty, |x| x.is_finite() && x > 0.0, "a finite number above 0")?;
        usage::must("--frequency-penalty", self.frequency_penalty, f64::is_finite, "a finite number")?;
        usage::must("--presence-penalty", self.presence_penalty, f64::is_finite, "a finite number")
    }

    fn params(&self) -> SamplingParams {
        let default = SamplingParams::default();
        SamplingParams {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_k: self.top_k.unwrap_or(default.top_k),
            top_p: self.top_p.unwrap_or(default.top_p),
            min_p: self.min_p.unwrap_or(default.min_p),
            penalty_repeat: self.repeat_penalty.unwrap_or(default.penalty_repeat),
            penalty_freq: self.frequency_penalty.unwrap_or(default.penalty_freq),
            penalty_present: self.presence_penalty.unwrap_or(default.penalty_present),
            penalty_last_n: self.repeat_last_n.unwrap_or(default.penalty_last_n),
            seed: self.seed.unwrap_or(default.seed),
            ignore_eos: self.ignore_eos.unwrap_or(default.ignore_eos),
            ..default
        }
    }
}

impl RunArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        self.check()?;
        let prompt = self.prompt_text()?;
        let config = self.engine_config()?;
        let started = Instant::now();
        let (path, loaded) = self.answer.model.load(&config)?;
        let prompt = if self.chat.unwrap_or(false) { self.chat_prompt(&loaded, &prompt)? } else { prompt };
        let interrupt = Interrupt::install();
        let engine = loaded.engine(&config)?;
        interrupt.watch(&engine);
        self.answer.note_unused(&engine);
        let loaded_after = started.elapsed();
        let request = Request {
            prompt: engine.tokenize(&prompt)?,
            max_tokens: self.n_predict,
            sampling: self.sampling.params(),
            domain: None,
            deadline: self.deadline.map(Duration::from_secs_f64),
        };
        let submitted = Instant::now();
        let stream = engine.submit(request)?;
        let answer = Answer::read(stream, submitted, output)?;
        // Also when Ctrl-C is doing so: no worker may outlive the program's end.
        engine.shutdown();
        log::info!("{}", answer.summary());
        output.json(&self.document(&path, &engine, &answer, loaded_after))?;
        answer.whole()
    }

    /// Refuses what would be ignored.
    fn check(&self) -> Result<(), CliError> {
        if self.system.is_some() && !self.chat.unwrap_or(false) {
            return Err(CliError::usage("--system needs --chat: a plain prompt has no place for a system message"));
        }
        usage::at_least_one("-n", Some(self.n_predict))?;
        let bounds = "a finite number of seconds, 0 or more and 1e9 at most";
        usage::must("--deadline", self.deadline, |seconds| (0.0..=LONGEST).contains(&seconds), bounds)?;
        self.sampling.check()
    }

    fn prompt_text(&self) -> Result<String, CliError> {
        let mut prompt = self.prompt.clone();
        if prompt == "-" {
            let mut bytes = Vec::new();
            let read = io::stdin().read_to_end(&mut bytes);
            read.map_err(|error| CliError::input(format!("cannot read the prompt from standard input: {error}")))?;
            prompt = String::from_utf8(bytes)
                .map_err(|_| CliError::input("the prompt on standard input is not UTF-8; convert it first"))?;
            let end = prompt.strip_suffix('\n').map(|text| text.strip_suffix('\r').unwrap_or(text).len());
            prompt.truncate(end.unwrap_or(prompt.len()));
        }
        if prompt.trim().is_empty() {
            return Err(CliError::input("the prompt is empty: give some text, or - and text on standard input"));
        }
        Ok(prompt)
    }

    fn engine_config(&self) -> Result<EngineConfig, CliError> {
        let alone = EngineConfig { decode: WorkerList::best(1), n_slots: 1, ..EngineConfig::default() };
        let mut config = self.answer.configure(alone)?;
        config.seed = self.sampling.seed.unwrap_or(config.seed);
        Ok(config)
    }

    fn chat_prompt(&self, loaded: &LoadedModel, prompt: &str) -> Result<String, CliError> {
        let system = self.system.as_deref().map(|text| ("system", text));
        let messages: Vec<(&str, &str)> = system.into_iter().chain([("user", prompt)]).collect();
        Ok(loaded.chat(&messages)?)
    }

    fn document(&self, path: &Path, engine: &Engine, answer: &Answer, load: Duration) -> Value {
        json!({
            "model": path.display().to_string(),
            "text": answer.text,
            "tokens": answer.tokens,
            "usage": answer.usage,
            "finish_reason": answer.reason,
            "policy": engine.policy_name(),
            "decision": answer.decision,
            "seed": self.sampling.params().seed,
            "timings": {
                "load_ms": milliseconds(load),
                "ttft_ms": answer.first.map(milliseconds),
                "tpot_ms": answer.tpot().map(milliseconds),
                "total_ms": milliseconds(answer.total),
            },
        })
    }
}

/// What came back for the prompt, and when, since it was submitted.
struct Answer {
    text: String,
    tokens: Vec<Token>,
    decision: Option<Decision>,
    reason: FinishReason,
    usage: Usage,
    first: Option<Duration>,
    last: Duration,
    total: Duration,
}

impl Answer {
    /// Reads to the end, printing as the text comes.
    fn read(mut stream: TokenStream, submitted: Instant, output: &mut Output) -> Result<Self, CliError> {
        let mut answer = Self {
            text: String::new(),
            tokens: Vec::new(),
            decision: None,
            reason: FinishReason::Stop,
            usage: Usage::default(),
            first: None,
            last: Duration::ZERO,
            total: Duration::ZERO,
        };
        while let Some(event) = stream.next() {
            match event {
                StreamEvent::Token { token, text, .. } => {
                    answer.last = submitted.elapsed();
                    answer.first.get_or_insert(answer.last);
                    answer.tokens.push(token);
                    answer.text.push_str(&text);
                    output.text(&text)?;
                }
                StreamEvent::Routed { decision, .. } => answer.decision = Some(*decision),
                StreamEvent::End { reason, usage, text } => {
                    answer.text.push_str(&text);
                    output.text(&format!("{text}\n"))?;
                    (answer.reason, answer.usage) = (reason, usage);
                }
                StreamEvent::Failed(error) => {
                    output.line("")?;
                    return Err(CliError::failed(error));
                }
            }
        }
        answer.total = submitted.elapsed();
        Ok(answer)
    }

    /// An error if the answer was cut short by something else than its length.
    fn whole(&self) -> Result<(), CliError> {
        let why = match self.reason {
            FinishReason::Stop | FinishReason::Length => return Ok(()),
            FinishReason::Cancelled => "interrupted",
            FinishReason::Deadline => "the deadline passed",
        };
        let n = self.usage.completion_tokens;
        Err(CliError::already_told(format!("{why} after {n} {}", if n == 1 { "token" } else { "tokens" })))
    }

    /// Time per output token after the first.
    fn tpot(&self) -> Option<Duration> {
        let n = u32::try_from(self.tokens.len()).ok()?.checked_sub(1).filter(|&n| n > 0)?;
        Some(self.last.saturating_sub(self.first?) / n)
    }

    fn summary(&self) -> String {
        let Usage { prompt_tokens, completion_tokens, .. } = self.usage;
        let first = self.first.map(|first| format!(", first after {:.1} ms", milliseconds(first)));
        let rest = self.tpot().map(|tpot| format!(", then {:.2} ms a token", milliseconds(tpot)));
        format!(
            "{prompt_tokens} prompt tokens, {completion_tokens} generated{}{}",
            first.unwrap_or_default(),
            rest.unwrap_or_default()
        )
    }
}

fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// Ctrl-C: ends the engine's requests as cancelled; a second one, or one before there is an engine, ends the process.
#[derive(Default)]
struct Interrupt(Arc<Mutex<Option<Engine>>>);

impl Interrupt {
    fn install() -> Self {
        let interrupt = Self::default();
        let engine = Arc::clone(&interrupt.0);
        let installed = ctrlc::set_handler(move || match engine.lock().take() {
            Some(engine) => {
                // The workers finish their step first; a second Ctrl-C does not wait for that.
                thread::spawn(move || engine.shutdown());
            }
            None => end_now(1),
        });
        if let Err(error) = installed {
            log::warn!("Ctrl-C will not end the answer early: {error}");
        }
        interrupt
    }

    fn watch(&self, engine: &Engine) {
        *self.0.lock() = Some(engine.clone());
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        // The handler is never removed, and must not keep the workers.
        self.0.lock().take();
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::error::Kind;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        run: RunArgs,
    }

    // Symptom: a system message without --chat never reached the model, and nobody was told.
    #[test]
    fn a_system_message_needs_the_chat_template() {
        let check = |flags: &[&str]| {
            let args = ["eldr", "hello"].iter().chain(flags);
            Alone::try_parse_from(args).expect("valid").run.check()
        };
        for flags in [&["--system", "x"][..], &["--system", "x", "--chat=false"]] {
            let error = check(flags).expect_err("refused");
            assert_eq!((error.kind, error.exit_code()), (Kind::Usage, 2));
        }
        for flags in [&["--system", "x", "--chat"][..], &["--chat"], &[]] {
            assert_eq!(check(flags), Ok(()));
        }
    }

    // Symptom: `--repeat-penalty 0` was refused as "penalty_repeat", `-n 0` as "max_tokens", `--deadline 1e300` as no
    // "number of seconds, 0 or more", and a deadline just below 2^64 seconds was a panic.
    #[test]
    fn a_wrong_number_is_named_by_its_option_and_value() {
        for (flags, want) in [
            ("--temperature inf", "--temperature is inf, which must be a finite number, 0 or more"),
            ("--top-p 7", "--top-p is 7, which must be between 0 and 1"),
            ("--min-p NaN", "--min-p is NaN, which must be between 0 and 1"),
            ("--repeat-penalty 0", "--repeat-penalty is 0, which must be a finite number above 0"),
            ("--frequency-penalty inf", "--frequency-penalty is inf, which must be a finite number"),
            ("--presence-penalty nan", "--presence-penalty is NaN, which must be a finite number"),
            ("-n 0", "-n is 0, which must be at least 1"),
            (
                "--deadline 1e300",
                "--deadline is 1e300, which must be a finite number of seconds, 0 or more and 1e9 at most",
            ),
            ("--deadline 18446744073709550000", "--deadline is 1.844674407370955e19"),
        ] {
            let args = format!("eldr hello {flags}");
            let error = Alone::try_parse_from(args.split(' ')).expect("numbers").run.check().expect_err(flags);
            assert!(error.message.starts_with(want) && error.kind == Kind::Usage, "{flags}: {}", error.message);
        }
    }

    // Symptom: an answer that the deadline cut off ended with exit code 0 and no word about it.
    #[test]
    fn an_answer_that_was_cut_off_is_a_failure() {
        let end = |reason, completion_tokens| {
            let usage = Usage { completion_tokens, ..Usage::default() };
            answer(reason, usage).whole()
        };
        assert_eq!(end(FinishReason::Stop, 2), Ok(()));
        assert_eq!(end(FinishReason::Length, 2), Ok(()));
        let late = end(FinishReason::Deadline, 1).expect_err("late");
        assert_eq!((late.message.as_str(), late.exit_code()), ("the deadline passed after 1 token", 1));
        let stopped = end(FinishReason::Cancelled, 2).expect_err("stopped");
        assert_eq!((stopped.message.as_str(), stopped.exit_code()), ("interrupted after 2 tokens", 1));
    }

    fn answer(reason: FinishReason, usage: Usage) -> Answer {
        Answer {
            text: String::new(),
            tokens: vec![1, 2, 3],
            decision: None,
            reason,
            usage,
            first: Some(Duration::from_millis(50)),
            last: Duration::from_millis(70),
            total: Duration::from_millis(71),
        }
    }

    #[test]
    fn time_per_output_token_leaves_the_first_out() {
        let mut answer = answer(FinishReason::Length, Usage::default());
        assert_eq!(answer.tpot(), Some(Duration::from_millis(10)));
        answer.tokens.truncate(1);
        assert_eq!(answer.tpot(), None);
    }
}
