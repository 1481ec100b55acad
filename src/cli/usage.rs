//! What is wrong with an argument, as one sentence of ours.
//!
//! Never decides what is wrong: clap does, and the verbs do.

use std::ffi::OsString;

use clap::{
    Command,
    error::{ContextKind, ContextValue, ErrorKind},
};
use eldr::types::{shown, shown_number};

use super::error::CliError;

/// What the standard library's parsers say, and what they mean.
const PARSERS: [(&str, &str); 7] = [
    ("invalid digit found in string", "it must be a whole number, 0 or more"),
    ("number would be zero for non-zero type", "it must be a whole number above 0"),
    ("number too large to fit in target type", "it is too large a number"),
    ("cannot parse integer from empty string", "it must be a whole number, 0 or more"),
    ("invalid float literal", "it must be a number"),
    ("cannot parse float from empty string", "it must be a number"),
    ("invalid IP address syntax", "it must be an IP address, such as 127.0.0.1 or ::1"),
];

/// Lets every option that takes a value take a negative number, so that what refuses it can say why.
pub fn allow_negative_numbers(command: Command) -> Command {
    let verbs: Vec<String> = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    verbs.iter().fold(command, |command, verb| {
        command.mut_subcommand(verb, |verb| {
            verb.mut_args(|arg| {
                let takes = arg.get_long().is_some() && arg.get_action().takes_values();
                if takes { arg.allow_negative_numbers(true) } else { arg }
            })
        })
    })
}

/// clap's message without its decoration, on one line; what it quotes is cut.
pub fn sentence(mut error: clap::Error) -> String {
    for quoted in [ContextKind::InvalidValue, ContextKind::InvalidArg, ContextKind::InvalidSubcommand] {
        if let Some(ContextValue::String(text)) = error.get(quoted) {
            let text = shown(text);
            error.insert(quoted, ContextValue::String(text));
        }
    }
    let text = error.render().to_string();
    let mut paragraphs = text.split("\n\n").map(|p| p.split_whitespace().collect::<Vec<_>>().join(" "));
    let first = paragraphs.next().unwrap_or_default();
    let first = first.strip_prefix("error: ").unwrap_or(&first);
    let ours = PARSERS.iter().find_map(|(theirs, ours)| Some(format!("{}{ours}", first.strip_suffix(theirs)?)));
    let first = ours.or_else(|| out_of_range(first)).unwrap_or_else(|| first.to_owned());
    let first = named_once(first);
    match paragraphs.find(|p| p.starts_with("tip: ")) {
        Some(tip) => format!("{first} ({})", shown(&tip["tip: ".len()..])),
        None => first,
    }
}

/// Without the value a second time, where the parser's own sentence begins with it.
fn named_once(said: String) -> String {
    let value = said.strip_prefix("invalid value ").and_then(|rest| rest.split_once(" for '"));
    value.map(|(value, _)| said.replacen(&format!(": {value} "), ": it ", 1)).unwrap_or(said)
}

/// What clap says of a number beyond its type: `.. for '--port <N>': 99999 is not in 0..=65535`.
fn out_of_range(said: &str) -> Option<String> {
    let (before, range) = said.rsplit_once(" is not in ")?;
    let (low, high) = range.split_once("..=")?;
    let (before, _) = before.rsplit_once(": ")?;
    Some(format!("{before}: it must be a whole number from {low} to {high}"))
}

/// Advice for a value that was taken for an option, which clap's own would lead astray: `--burst -1,2`.
pub fn value_taken_for_option(error: &clap::Error, args: &[OsString]) -> Option<String> {
    let (ErrorKind::UnknownArgument, Some(ContextValue::String(unknown))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    else {
        return None;
    };
    args.windows(2).find_map(|pair| {
        let (option, value) = (pair[0].to_str()?, pair[1].to_str()?);
        let rest = value.strip_prefix('-')?.to_ascii_lowercase();
        let is_number = rest.starts_with(|c: char| c.is_ascii_digit() || c == '.') || rest.starts_with("inf");
        let is_value = option.starts_with("--") && !option.contains('=') && is_number && value.starts_with(unknown);
        let value = shown(value);
        is_value.then(|| format!("'{value}' looks like an option: to give it to {option}, write {option}={value}"))
    })
}

/// Refuses a number that is given and does not do: `--flag is -1, which must be ..`.
pub fn must<T: Copy + std::fmt::Display + std::fmt::LowerExp + Into<f64>>(
    flag: &str,
    given: Option<T>,
    holds: impl Fn(f64) -> bool,
    what: &str,
) -> Result<(), CliError> {
    match given {
        Some(number) if !holds(number.into()) => {
            Err(CliError::usage(format!("{flag} is {}, which must be {what}", shown_number(number))))
        }
        _ => Ok(()),
    }
}

/// Refuses 0 of what there must be one of.
pub fn at_least_one<T: Copy + Default + PartialEq>(flag: &str, given: Option<T>) -> Result<(), CliError> {
    match given {
        Some(number) if number == T::default() => {
            Err(CliError::usage(format!("{flag} is 0, which must be at least 1")))
        }
        _ => Ok(()),
    }
}

/// Refuses more of something than can end or fit in memory, which is a typing error: `--flag is N, which must be ..`.
pub fn at_most<T: Copy + PartialOrd + std::fmt::Display>(
    flag: &str,
    given: Option<T>,
    most: T,
) -> Result<(), CliError> {
    match given {
        Some(number) if number > most => {
            let why = "so that it ends and fits in memory";
            Err(CliError::usage(format!("{flag} is {number}, which must be at most {most}, {why}")))
        }
        _ => Ok(()),
    }
}

/// Whether it is a temperature: what the verbs that draw tokens take.
pub fn temperature(given: Option<f32>) -> Result<(), CliError> {
    must("--temperature", given, |t| t.is_finite() && t >= 0.0, "a finite number, 0 or more")
}

#[cfg(test)]
mod tests {
    use clap::{Arg, value_parser};

    use super::*;

    fn refused(line: &str) -> String {
        let number = |name: &'static str| Arg::new(name).long(name);
        let verb = Command::new("run")
            .arg(number("rate").value_parser(value_parser!(f64)))
            .arg(number("seed").value_parser(value_parser!(u64)))
            .arg(number("port").value_parser(value_parser!(u16)))
            .arg(number("host").value_parser(value_parser!(std::net::IpAddr)))
            .arg(number("burst"));
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let command = allow_negative_numbers(Command::new("eldr").subcommand(verb));
        let error = command.try_get_matches_from(&args).expect_err("refused");
        value_taken_for_option(&error, &args).unwrap_or_else(|| sentence(error))
    }

    // Symptom: `--rate -1` was answered with "unexpected argument '-1' found", and advice that led nowhere.
    #[test]
    fn a_negative_number_is_a_value() {
        let command = allow_negative_numbers(crate::cli::command());
        for line in ["run --temperature -1 x", "bench --workload w --rate -2.5", "bench --workload w --warmup -1e3"] {
            let args = ["eldr"].into_iter().chain(line.split(' '));
            assert!(command.clone().try_get_matches_from(args).is_ok(), "{line}");
        }
        assert_eq!(
            refused("eldr run --seed -1"),
            "invalid value '-1' for '--seed <seed>': it must be a whole number, 0 or more"
        );
        for value in ["-1,2", "-inf", "-.5"] {
            assert_eq!(
                refused(&format!("eldr run --burst {value}")),
                format!("'{value}' looks like an option: to give it to --burst, write --burst={value}")
            );
        }
    }

    // Symptom: what a parser of the standard library says of a wrong value was all there was: "invalid float literal".
    #[test]
    fn a_parsers_words_are_ours() {
        assert_eq!(refused("eldr run --rate fast"), "invalid value 'fast' for '--rate <rate>': it must be a number");
        assert!(refused("eldr run --seed 99999999999999999999").ends_with("it is too large a number"));
        let port = "invalid value '70000' for '--port <port>': it must be a whole number from 0 to 65535";
        assert_eq!(refused("eldr run --port 70000"), port);
        let host = "invalid value 'here' for '--host <host>': it must be an IP address, such as 127.0.0.1 or ::1";
        assert_eq!(refused("eldr run --host here"), host);
    }

    // Symptom: "invalid value '2@cpu[9-1]' for '--decode <WORKERS>': '2@cpu[9-1]' in the workers '2@cpu[9-1]' '9-1' runs
    // backwards".
    #[test]
    fn a_wrong_value_is_named_once() {
        let refused = |args: [&str; 4]| {
            sentence(crate::cli::command().try_get_matches_from(["eldr"].iter().chain(&args)).expect_err("refused"))
        };
        assert_eq!(
            refused(["run", "--decode", "2@cpu[9-1]", "x"]),
            "invalid value '2@cpu[9-1]' for '--decode <WORKERS>': it names wrong processors: '9-1' runs backwards; write 1-9"
        );
        assert_eq!(
            refused(["run", "--decode", "1,0@cpu", "x"]),
            "invalid value '1,0@cpu' for '--decode <WORKERS>': '0@cpu' in the workers '1,0@cpu' asks for zero workers"
        );
    }

    // Symptom: a wrong value or argument of any length, with any escape sequence, was repeated as it was.
    #[test]
    fn what_is_quoted_is_cut_and_harmless() {
        let long = "\u{1b}[31m\n".repeat(100);
        for args in [["run", "--seed", &long], ["run", "--rate", &long], ["run", &long, "x"], [&long, "x", "x"]] {
            let args: Vec<OsString> = ["eldr"].into_iter().chain(args).map(OsString::from).collect();
            let verb = Command::new("run").arg(Arg::new("seed").long("seed").value_parser(value_parser!(u64)));
            let verb = verb.arg(Arg::new("rate").long("rate").value_parser(value_parser!(f64)));
            let error = Command::new("eldr").subcommand(verb).try_get_matches_from(args).expect_err("refused");
            let sentence = sentence(error);
            assert!(sentence.len() < 600 && !sentence.contains(char::is_control), "{sentence}");
        }
    }

    // Symptom: `--temperature inf` was refused because it "must be 0 or more".
    #[test]
    fn a_number_out_of_bounds_is_named_with_them() {
        let refused = |given: Option<f32>| temperature(given).map_err(|error| error.message);
        assert_eq!(refused(None).and(refused(Some(0.0))).and(refused(Some(1.5))), Ok(()));
        for (given, shown) in [(f32::INFINITY, "inf"), (f32::NAN, "NaN"), (-1.0, "-1"), (-1e-30, "-1e-30")] {
            let want = format!("--temperature is {shown}, which must be a finite number, 0 or more");
            assert_eq!(refused(Some(given)), Err(want));
        }
        assert!(at_least_one("--requests", Some(0u32)).is_err() && at_least_one("--requests", Some(1u32)).is_ok());
        let many = at_most("--repeats", Some(1001), 1000).expect_err("too many").message;
        assert_eq!(many, "--repeats is 1001, which must be at most 1000, so that it ends and fits in memory");
        assert!(at_most("--repeats", Some(1000), 1000).is_ok() && at_most("--repeats", None, 1000).is_ok());
    }
}
