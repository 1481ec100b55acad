//! Every option of every verb as a setting: from the configuration file, over it the environment, over both the flags.
//!
//! Never interprets a value; the option's own parser judges it, wherever it came from.

use std::{any::TypeId, ffi::OsString, fs, ops::Range, path::PathBuf};

use clap::{Arg, ArgAction, Command, builder::OsStr};
use eldr::types::shown;
use toml::de::{DeTable, DeValue};

use super::{error::CliError, nearest::close_to, usage::sentence};

/// Options of one call, which no file or environment should carry over to another.
const NOT_SETTINGS: [&str; 15] = [
    "check",
    "config",
    "factor",
    "fit",
    "force",
    "help",
    "html",
    "json",
    "output",
    "placement",
    "prompt",
    "rows",
    "size",
    "svg",
    "version",
];

/// The name of the environment's setting for the option `--long`.
pub fn env_name(long: &str) -> String {
    format!("ELDR_{}", long.replace('-', "_").to_uppercase())
}

/// The options of `command` and its verbs that are settings, and their aliases, sorted.
pub fn names(command: &Command) -> Vec<String> {
    let verbs = command.get_subcommands().flat_map(Command::get_arguments);
    names_of(command.get_arguments().chain(verbs))
}

/// Those of the environment's variables that are named as settings are and are none.
pub fn unknown(variables: impl Iterator<Item = OsString>) -> Vec<String> {
    let mut known: Vec<String> = names(&super::command()).iter().map(|name| env_name(name)).collect();
    known.push(env_name("config"));
    let ours = variables.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with("ELDR_"));
    ours.filter(|name| !known.contains(name)).collect()
}

fn names_of<'a>(args: impl Iterator<Item = &'a Arg>) -> Vec<String> {
    let all = args.filter_map(|arg| Some([vec![setting_name(arg)?], aliases(arg)].concat())).flatten();
    let mut names: Vec<String> = all.map(str::to_owned).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn aliases(arg: &Arg) -> Vec<&str> {
    arg.get_all_aliases().unwrap_or_default()
}

/// How a setting's name stands for an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Alias,
    Name,
}

impl By {
    /// In the order of setting, so that an option's own name outweighs its alias, which may be another verb's option.
    const ALL: [Self; 2] = [Self::Alias, Self::Name];

    fn finds(self, arg: &Arg, name: &str) -> bool {
        setting_name(arg).is_some_and(|own| match self {
            Self::Alias => aliases(arg).contains(&name),
            Self::Name => own == name,
        })
    }
}

fn setting_name(arg: &Arg) -> Option<&str> {
    arg.get_long().filter(|long| !NOT_SETTINGS.contains(long) && arg.get_action().takes_values())
}

/// `command` with the settings of the file that `args` or the environment name, and of the environment, as defaults.
pub fn apply(command: Command, args: &[OsString], env: impl Fn(&str) -> Option<OsString>) -> Result<Command, CliError> {
    let env = |name: &str| env(name).filter(|value| !value.is_empty());
    let command = match config_path(args).or_else(|| env(&env_name("config")).map(PathBuf::from)) {
        Some(path) => apply_file(command, &path)?,
        None => command,
    };
    apply_env(command, env)
}

/// The value of `--config` before a lone `--`.
fn config_path(args: &[OsString]) -> Option<PathBuf> {
    let mut args = args.iter().take_while(|arg| *arg != "--");
    while let Some(arg) = args.next() {
        if arg == "--config" {
            return args.next().map(PathBuf::from);
        }
        // A path that is not Unicode has to be an argument of its own.
        if let Some(path) = arg.to_str().and_then(|arg| arg.strip_prefix("--config=")) {
            return Some(PathBuf::from(path));
        }
    }
    None
}

/// A value for an option, and where it was found.
struct Found {
    values: Vec<OsString>,
    /// The first of the values that is none of TOML's strings.
    bare: Option<String>,
    kind: Kind,
    place: String,
}

/// What was written, as far as an option's own parser does not see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A list of TOML's.
    List,
    /// true or false of TOML's.
    Switch,
    /// Another value of TOML's.
    Single,
    /// Text of the environment, which is all there is.
    Environment,
}

impl Found {
    fn in_file(value: &DeValue<'_>, name: &str, place: String) -> Result<Self, CliError> {
        let values = values_of(value, &place, name)?;
        let kind = match value {
            DeValue::Array(_) => Kind::List,
            DeValue::Boolean(_) => Kind::Switch,
            _ => Kind::Single,
        };
        Ok(Self { values, bare: bare(value), kind, place })
    }
}

fn apply_file(mut command: Command, path: &PathBuf) -> Result<Command, CliError> {
    let file = path.display();
    let text = fs::read_to_string(path)
        .map_err(|error| CliError::usage(format!("cannot read the configuration {file}: {error}")))?;
    let place =
        |span: Range<usize>| format!("{file}, line {}", 1 + text[..span.start.min(text.len())].matches('\n').count());
    let table = DeTable::parse(&text).map_err(|error| {
        let place = error.span().map_or_else(|| file.to_string(), place);
        CliError::usage(format!("{place}: {}", error.message()))
    })?;
    let known = names(&command);
    let verbs: Vec<String> = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    // Tables last, so that what is set for one verb outweighs what is set for all.
    let (tables, plain): (Vec<_>, Vec<_>) =
        table.get_ref().iter().partition(|(_, value)| matches!(value.get_ref(), DeValue::Table(_)));
    let mut given = Vec::new();
    for (key, value) in plain {
        let name = key.get_ref().as_ref();
        if !known.iter().any(|known| known == name) {
            let place = place(key.span());
            let close = close_to(name, known.iter().map(String::as_str));
            let name = shown(name);
            return Err(CliError::usage(format!(
                "{place}: unknown key '{name}'{close}; the keys are the options' names, which `eldr VERB --help` lists"
            )));
        }
        let place = place(key.span());
        given.push((name, None, Found::in_file(value.get_ref(), name, place)?));
    }
    command = set_all(command, &given)?;
    given.clear();
    for (verb, value) in tables {
        let DeValue::Table(table) = value.get_ref() else { continue };
        let name = verb.get_ref().as_ref();
        if !verbs.iter().any(|known| known == name) {
            let place = place(verb.span());
            let verbs = verbs.join(", ");
            let name = shown(name);
            return Err(CliError::usage(format!("{place}: unknown table '{name}'; the verbs are {verbs}")));
        }
        let known = command.get_subcommands().filter(|sub| sub.get_name() == name);
        let known = names_of(known.flat_map(Command::get_arguments));
        for (key, value) in table {
            let place = place(key.span());
            let key = key.get_ref().as_ref();
            if !known.iter().any(|known| known == key) {
                let close = close_to(key, known.iter().map(String::as_str));
                let key = shown(key);
                return Err(CliError::usage(format!(
                    "{place}: unknown key '{key}' of {name}{close}; `eldr {name} --help` lists its keys"
                )));
            }
            given.push((key, Some(name), Found::in_file(value.get_ref(), key, place)?));
        }
    }
    set_all(command, &given)
}

fn apply_env(command: Command, env: impl Fn(&str) -> Option<OsString>) -> Result<Command, CliError> {
    let names = names(&command);
    let found = |name: &String| {
        let place = env_name(name);
        env(&place).map(|value| Found { values: vec![value], bare: None, kind: Kind::Environment, place })
    };
    let given: Vec<_> = names.iter().filter_map(|name| Some((name.as_str(), None, found(name)?))).collect();
    set_all(command, &given)
}

/// Sets each name, for one verb or for all, to what was found.
fn set_all(mut command: Command, given: &[(&str, Option<&str>, Found)]) -> Result<Command, CliError> {
    for by in By::ALL {
        for (name, verb, found) in given {
            command = set(command, name, by, *verb, found)?;
        }
    }
    Ok(command)
}

/// What a TOML value would be on the command line.
fn values_of(value: &DeValue<'_>, place: &str, name: &str) -> Result<Vec<OsString>, CliError> {
    let refuse = |what: &str| Err(CliError::usage(format!("{place}: {name} is {what}, which no setting is")));
    Ok(match value {
        DeValue::String(text) => vec![text.as_ref().into()],
        DeValue::Integer(number) => match i128::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => vec![number.to_string().into()],
            Err(_) => return refuse("too large a number"),
        },
        DeValue::Float(number) => vec![number.as_str().into()],
        DeValue::Boolean(on) => vec![on.to_string().into()],
        DeValue::Array(items) => {
            let items = items.iter().map(|item| values_of(item.get_ref(), place, name));
            items.collect::<Result<Vec<_>, _>>()?.concat()
        }
        DeValue::Datetime(_) => return refuse("a date"),
        DeValue::Table(_) => return refuse("a table"),
    })
}

/// What is written without quotes, as it stands.
fn bare(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::Integer(number) => Some(number.as_str().to_owned()),
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(on) => Some(on.to_string()),
        DeValue::Array(items) => items.iter().find_map(|item| bare(item.get_ref())),
        DeValue::String(_) | DeValue::Datetime(_) | DeValue::Table(_) => None,
    }
}

/// Whether any text does: what is meant as a number would be taken for a name.
fn takes_text(arg: &Arg) -> bool {
    let kind = arg.get_value_parser().type_id();
    kind == TypeId::of::<String>() || kind == TypeId::of::<PathBuf>()
}

/// Makes `found` the default of the option `name` of `verb`, or of every verb that has it.
fn set(command: Command, name: &str, by: By, verb: Option<&str>, found: &Found) -> Result<Command, CliError> {
    let mut error = None;
    let mut set_one = |arg: Arg| {
        if !by.finds(&arg, name) {
            return arg;
        }
        if let Err(why) = check(&arg, found) {
            error.get_or_insert(why);
            return arg;
        }
        arg.required(false).default_values(found.values.iter().map(OsStr::from))
    };
    let mut command = if verb.is_none() { command.mut_args(&mut set_one) } else { command };
    let verbs: Vec<String> = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    for sub in verbs.iter().filter(|sub| verb.is_none_or(|verb| verb == *sub)) {
        command = command.mut_subcommand(sub, |sub| sub.mut_args(&mut set_one));
    }
    error.map_or(Ok(command), Err)
}

/// Parses the value as if it were given on the command line.
fn check(arg: &Arg, found: &Found) -> Result<(), CliError> {
    let name = arg.get_long().unwrap_or_default();
    if found.kind == Kind::List && !matches!(arg.get_action(), ArgAction::Append) {
        return Err(CliError::usage(format!("{}: {name} takes one value, not a list", found.place)));
    }
    let is_switch = arg.get_value_parser().type_id() == TypeId::of::<bool>();
    if is_switch && found.kind == Kind::Single {
        let (place, value) = (&found.place, shown(&found.values[0].to_string_lossy()));
        return Err(CliError::usage(format!(
            "{place}: invalid value '{value}' for '--{name}': write true or false, without quotes"
        )));
    }
    if let Some(bare) = found.bare.as_deref().filter(|_| takes_text(arg)) {
        let (place, bare) = (&found.place, shown(bare));
        return Err(CliError::usage(format!(
            "{place}: {name} is {bare}, which must be a text: write '{bare}' in quotes"
        )));
    }
    let flags = found.values.iter().map(|value| {
        let mut flag = OsString::from(format!("--{name}="));
        flag.push(value);
        flag
    });
    let alone = Command::new("eldr").no_binary_name(true).disable_help_flag(true).arg(arg.clone().required(false));
    match alone.try_get_matches_from(flags) {
        Ok(_) => Ok(()),
        Err(error) => Err(CliError::usage(format!("{}: {}", found.place, sentence(error)))),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use clap::value_parser;

    use super::*;

    fn command() -> Command {
        let number = |id: &'static str, long: &'static str| Arg::new(id).long(long).value_parser(value_parser!(u32));
        let tokens = number("n", "n-predict").visible_alias("max-tokens").default_value("64");
        Command::new("eldr")
            .subcommand(Command::new("run").arg(tokens))
            .subcommand(Command::new("bench").arg(number("m", "max-tokens").default_value("32")))
    }

    /// Values of `run --n-predict` and `bench --max-tokens`.
    fn settled(file: &str, env: &[(&str, &str)]) -> [String; 2] {
        let mut config = tempfile::NamedTempFile::new().expect("a file");
        config.write_all(file.as_bytes()).expect("written");
        let args = ["eldr".into(), "--config".into(), config.path().into()];
        let env = |name: &str| env.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        let command = apply(command(), &args, env).expect("good settings");
        [("run", "n"), ("bench", "m")].map(|(verb, id)| {
            let matches = command.clone().get_matches_from(["eldr", verb]);
            let (_, matches) = matches.subcommand().expect("a verb");
            matches.get_one::<u32>(id).expect("a default").to_string()
        })
    }

    // Symptom: ELDR_MAX_TOKENS and `max-tokens` of the file, aliases of an option, changed nothing in run.
    #[test]
    fn an_alias_is_a_setting_and_yields_to_the_options_own_name() {
        assert_eq!(settled("", &[]), ["64", "32"]);
        assert_eq!(settled("", &[("ELDR_MAX_TOKENS", "5")]), ["5", "5"]);
        assert_eq!(settled("", &[("ELDR_MAX_TOKENS", "5"), ("ELDR_N_PREDICT", "6")]), ["6", "5"]);
        assert_eq!(settled("max-tokens = 7", &[]), ["7", "7"]);
        assert_eq!(settled("n-predict = 8\nmax-tokens = 7", &[]), ["8", "7"]);
        assert_eq!(settled("[run]\nmax-tokens = 9", &[]), ["9", "32"]);
        assert_eq!(settled("n-predict = 8\n[run]\nmax-tokens = 9", &[("ELDR_MAX_TOKENS", "5")]), ["5", "5"]);
        assert_eq!(names(&command()), ["max-tokens", "n-predict"]);
    }
}
