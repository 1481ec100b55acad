//! The command line: verbs, their options, what they print, how they end.
//!
//! Never runs a model itself; each verb calls the engine, the calibration or the bench and shows what came back.
//!
//! With `--json` a verb prints exactly one JSON document on standard output: its result, or
//! `{"error": {"message", "kind"}}`. The kinds are `usage` and `input` (exit code 2), `failed` (exit code 1). Without it, errors are one sentence on standard error.

mod answering;
mod args;
mod bench;
mod calibrate;
mod cost;
mod doctor;
mod error;
mod inflate;
mod inspect;
mod lists;
#[cfg(feature = "server")]
mod made;
mod model;
mod nearest;
mod output;
mod progress;
mod prompts;
mod record;
mod report;
mod route;
mod rpc_server;
mod run;
#[cfg(feature = "server")]
mod serve;
mod settings;
mod simulate;
mod size;
mod sweep;
mod unused;
mod usage;

use std::{
    env,
    ffi::OsString,
    io::Write as _,
    panic::{self, AssertUnwindSafe},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};
use clap_complete::Shell;
use eldr::{engine::check_output, types::visible};
use log::LevelFilter;
use serde_json::json;

use self::{
    error::{CliError, Kind},
    output::{Output, check_apart, complain},
};

const AFTER_HELP: &str = "\
Every option NAME that says how, and not what to write or to answer, is also a setting: NAME = value in the TOML file given by --config, or ELDR_NAME in the environment \
(upper case, _ for -). Flags outweigh the environment, which outweighs the file; a table [VERB] of the file outweighs \
its other lines for that verb.";

/// Serve mixture-of-experts GGUF models on several workers, each request routed by expert locality.
#[derive(Debug, Parser)]
#[command(name = "eldr", version, arg_required_else_help = true, after_help = AFTER_HELP)]
struct Cli {
    /// TOML file of settings
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Say more on standard error; -vv says llama.cpp's warnings too, -vvv everything
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Generate text for one prompt
    Run(run::RunArgs),
    /// Answer HTTP requests, as OpenAI's API and llama-server do
    #[cfg(feature = "server")]
    Serve(serve::ServeArgs),
    /// Record which experts prompts and their answers pick, into a trace
    Record(record::RecordArgs),
    /// Fit a calibration to prompts, a trace or counts, and tell whether locality helps
    Calibrate(calibrate::CalibrateArgs),
    /// Show where a calibration sends requests whose counts are given
    Route(route::RouteArgs),
    /// Serve a workload under several policies and compare
    Bench(bench::BenchArgs),
    /// Serve a recording by any number of workers, simulated
    Simulate(simulate::SimulateArgs),
    /// Draw tables and charts of rows that were measured before
    Report(report::ReportArgs),
    /// Show what a model or a calibration is, and which experts a prompt picks
    Inspect(inspect::InspectArgs),
    /// Write a model with larger experts and the same outputs
    Inflate(inflate::InflateArgs),
    /// Lend a device of this machine to other machines
    RpcServer(rpc_server::RpcServerArgs),
    /// Look for what would keep a model from running well
    Doctor(doctor::DoctorArgs),
    /// Print a completion script
    Completions {
        /// The shell to complete in
        shell: Shell,
        /// Print one JSON document
        #[arg(long)]
        json: bool,
    },
}

/// llama.cpp's short options of several letters, which clap does not have.
const LLAMA_CPP_OPTIONS: [(&str, &str); 4] =
    [("-ngl", "--n-gpu-layers"), ("-fa", "--flash-attn"), ("-cmoe", "--cpu-moe"), ("-ncmoe", "--n-cpu-moe")];

/// Runs the program with these arguments, the program's name first.
pub fn main(mut args: Vec<OsString>) -> ExitCode {
    panic::set_hook(Box::new(|info| log::debug!("{info}")));
    for arg in args.iter_mut().skip(1).take_while(|arg| **arg != "--") {
        if let Some((_, long)) = LLAMA_CPP_OPTIONS.iter().find(|(short, _)| **arg == **short) {
            *arg = (*long).into();
        }
    }
    // A failure before the arguments are understood has to know, too.
    let mut wants_json = asks_for_json(&args);
    let result = panic::catch_unwind(AssertUnwindSafe(|| {
        let Some(cli) = parse(&args)? else { return Ok(()) };
        start_log(cli.verbose);
        wants_json = cli.verb.json();
        for name in settings::unknown(env::vars_os().map(|(name, _)| name)) {
            log::warn!("{name} is set, but there is no such setting; see `eldr --help` for how they are named");
        }
        if let Some(config) = &cli.config {
            for (_, output) in cli.verb.outputs() {
                check_output(output, &[config]).map_err(CliError::usage)?;
            }
        }
        check_apart(&cli.verb.outputs())?;
        cli.verb.run()
    }));
    let result = result.unwrap_or_else(|panic| Err(internal(panic.as_ref())));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error, wants_json);
            ExitCode::from(error.exit_code())
        }
    }
}

/// Whether a document goes to standard output, as far as arguments tell that may be wrong.
fn asks_for_json(args: &[OsString]) -> bool {
    let words: Vec<&OsString> = args.iter().skip(1).take_while(|arg| **arg != "--").collect();
    // The bench's `--json` may name a file.
    let is_bench = words.iter().any(|word| **word == "bench");
    let to_stdout = |at: usize| !is_bench || words.get(at + 1).is_none_or(|next| **next == "-");
    words.iter().enumerate().any(|(at, word)| **word == "--json=-" || (**word == "--json" && to_stdout(at)))
}

/// The arguments over the settings; nothing if they only asked for help or the version, which is printed.
fn parse(args: &[OsString]) -> Result<Option<Cli>, CliError> {
    let error = match understand(args, |name| env::var_os(name))? {
        Ok(cli) => return Ok(Some(cli)),
        Err(error) => error,
    };
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            Output::new(false).text(&error.render().to_string())?;
            Ok(None)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let command = command();
            let verbs: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
            Err(CliError::usage(format!("no verb given; they are {}", verbs.join(", "))))
        }
        _ => {
            let verb = args.get(1).and_then(|arg| arg.to_str()).filter(|arg| !arg.starts_with('-'));
            let known = verb.filter(|verb| command().find_subcommand(verb).is_some());
            let help = known.map_or("eldr --help".to_owned(), |verb| format!("eldr {verb} --help"));
            let taken = usage::value_taken_for_option(&error, args);
            Err(CliError::usage(format!("{}; see `{help}`", taken.unwrap_or_else(|| usage::sentence(error)))))
        }
    }
}

/// The arguments over the settings. What needs no setting is understood although a setting is wrong.
fn understand(args: &[OsString], env: impl Fn(&str) -> Option<OsString>) -> Result<Result<Cli, clap::Error>, CliError> {
    let read =
        |command: clap::Command| command.try_get_matches_from(args).and_then(|matches| Cli::from_arg_matches(&matches));
    let wrong = match settings::apply(command(), args, env) {
        Ok(settled) => return Ok(read(settled)),
        Err(wrong) => wrong,
    };
    match read(command()) {
        Ok(cli) if matches!(cli.verb, Verb::Completions { .. }) => Ok(Ok(cli)),
        Err(asked) if matches!(asked.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => Ok(Err(asked)),
        _ => Err(wrong),
    }
}

/// The program's options, before any setting.
fn command() -> clap::Command {
    usage::allow_negative_numbers(Cli::command())
}

fn report(error: &CliError, wants_json: bool) {
    if error.kind == Kind::Closed {
        return;
    }
    if wants_json && error.kind != Kind::Told {
        // Nobody is left to tell when this fails.
        let _ = Output::new(true).json(&error.to_json());
    }
    complain(&format!("eldr: {}", error.message));
}

fn internal(panic: &(dyn std::any::Any + Send)) -> CliError {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    CliError::failed(format!("internal error, please report it: {text}"))
}

/// Quiet by default: warnings of eldr, and of llama.cpp only what ends the process, since its errors are in ours.
fn start_log(verbose: u8) {
    let (ours, llama_cpp) = match verbose {
        0 => (LevelFilter::Warn, LevelFilter::Error),
        1 => (LevelFilter::Info, LevelFilter::Error),
        2 => (LevelFilter::Debug, LevelFilter::Info),
        _ => (LevelFilter::Trace, LevelFilter::Trace),
    };
    env_logger::Builder::new()
        .filter_level(ours)
        .filter_module("llama.cpp", llama_cpp)
        .format(|buffer, record| {
            let from = if record.target() == "llama.cpp" { "llama.cpp: " } else { "" };
            let said = visible(&record.args().to_string());
            writeln!(buffer, "eldr: {}: {from}{said}", record.level().as_str().to_lowercase())
        })
        .init();
}

impl Verb {
    /// Whether standard output takes one JSON document.
    fn json(&self) -> bool {
        match self {
            Self::Run(args) => args.json,
            #[cfg(feature = "server")]
            Self::Serve(args) => args.json,
            Self::Record(args) => args.json,
            Self::Calibrate(args) => args.json,
            Self::Route(args) => args.json,
            Self::Bench(args) => args.json_to_stdout(),
            Self::Simulate(args) => args.json,
            Self::Report(args) => args.json,
            Self::Inspect(args) => args.json,
            Self::Inflate(args) => args.json,
            Self::Doctor(args) => args.json,
            Self::RpcServer(args) => args.json,
            Self::Completions { json, .. } => *json,
        }
    }

    /// The files it writes, each with its option.
    fn outputs(&self) -> Vec<(&'static str, &Path)> {
        match self {
            Self::Calibrate(args) => vec![("--output", args.output.as_path())],
            Self::Bench(args) => args.outputs(),
            Self::Simulate(args) => args.outputs(),
            Self::Report(args) => args.outputs(),
            Self::Inflate(args) => vec![("--output", args.output.as_path())],
            Self::Record(args) => vec![("--output", args.output.as_path())],
            #[cfg(feature = "server")]
            Self::Serve(args) => args.outputs(),
            Self::Run(_)
            | Self::Route(_)
            | Self::Inspect(_)
            | Self::Doctor(_)
            | Self::RpcServer(_)
            | Self::Completions { .. } => Vec::new(),
        }
    }

    fn run(self) -> Result<(), CliError> {
        let mut output = Output::new(self.json());
        match self {
            Self::Run(args) => args.run(&mut output),
            #[cfg(feature = "server")]
            Self::Serve(args) => args.run(&mut output),
            Self::Record(args) => args.run(&mut output),
            Self::Calibrate(args) => args.run(&mut output),
            Self::Route(args) => args.run(&mut output),
            Self::Bench(args) => args.run(&mut output),
            Self::Simulate(args) => args.run(&mut output),
            Self::Report(args) => args.run(&mut output),
            Self::Inspect(args) => args.run(&mut output),
            Self::Inflate(args) => args.run(&mut output),
            Self::Doctor(args) => args.run(&mut output),
            Self::RpcServer(args) => args.run(&mut output),
            Self::Completions { shell, .. } => completions(shell, &mut output),
        }
    }
}

fn completions(shell: Shell, output: &mut Output) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "eldr", &mut script);
    let script = String::from_utf8_lossy(&script);
    output.text(&script)?;
    output.json(&json!({ "shell": shell.to_string(), "script": script }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_verb_has_an_option_twice() {
        let mut command = command();
        command.build();
        for verb in command.get_subcommands() {
            let mut names: Vec<String> = verb
                .get_arguments()
                .flat_map(|arg| [arg.get_short().map(String::from), arg.get_long().map(str::to_owned)])
                .flatten()
                .collect();
            names.sort_unstable();
            let n_names = names.len();
            names.dedup();
            assert_eq!(names.len(), n_names, "{}: {names:?}", verb.get_name());
        }
    }

    // Symptom: with a bad ELDR_SLOTS in the environment not even --help worked.
    #[test]
    fn a_wrong_setting_does_not_keep_help_from_being_shown() {
        let env = |name: &str| (name == "ELDR_SLOTS").then(|| "many".into());
        let read = |line: &str| {
            let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            understand(&args, env)
        };
        for line in ["eldr --help", "eldr --version", "eldr run --help", "eldr help run"] {
            let asked = read(line).expect("no setting is needed").expect_err("asks for words");
            assert!(matches!(asked.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion), "{line}");
        }
        assert!(matches!(read("eldr completions bash"), Ok(Ok(_))));
        for line in ["eldr run hello", "eldr doctor"] {
            assert!(read(line).expect_err("a wrong setting").message.contains("ELDR_SLOTS"), "{line}");
        }
    }

    #[test]
    fn json_on_standard_output_is_seen_before_arguments_are_understood() {
        let asks = |line: &str| asks_for_json(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>());
        for line in ["eldr run --json", "eldr --json run", "eldr bench --json", "eldr bench --json - x"] {
            assert!(asks(line), "{line}");
        }
        for line in ["eldr run", "eldr run -- --json", "eldr bench --json out.json"] {
            assert!(!asks(line), "{line}");
        }
    }
}
