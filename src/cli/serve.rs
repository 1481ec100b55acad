//! `eldr serve`: the HTTP server over an engine.
//!
//! Never answers a request itself; that is `eldr::server`.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use eldr::{
    engine::{EngineConfig, LoadedModel},
    server::{Ended, ModelCard, Server, ServerConfig, ServerError},
};
use serde_json::json;

use super::{
    answering::AnswerArgs,
    args::switch,
    error::CliError,
    made::Made,
    output::{Output, end_now, note},
};

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Address to listen on; this machine alone can reach the default
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// Start everything but the listening, say what would be served, and end
    #[arg(long)]
    check: bool,
    /// Print one JSON document once listening
    #[arg(long)]
    pub json: bool,
    /// The model's name for clients; its file's without it
    #[arg(short, long, value_name = "NAME")]
    alias: Option<String>,
    /// A key that lets requests in; may be repeated
    #[arg(long, value_name = "KEY", hide_default_value = true)]
    api_key: Vec<String>,
    /// A file with one such key a line; lines that begin with # are comments
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// A file with a chat template in Jinja, instead of the model's own
    #[arg(long, value_name = "FILE")]
    chat_template_file: Option<PathBuf>,
    /// MiB of a request's body at most
    #[arg(long, value_name = "N")]
    max_body: Option<usize>,
    /// Connections open at once
    #[arg(long, value_name = "N")]
    max_connections: Option<usize>,
    /// Answers one request may ask for
    #[arg(long, value_name = "N")]
    max_choices: Option<usize>,
    /// Seconds a request may wait for its first token; 0 is for ever
    #[arg(long, value_name = "SECONDS")]
    queue_timeout: Option<u64>,
    /// Seconds an answer may take; 0 is for ever
    #[arg(long, value_name = "SECONDS")]
    request_timeout: Option<u64>,
    /// Seconds running requests get to end at a shutdown
    #[arg(long, value_name = "SECONDS")]
    drain_timeout: Option<u64>,
    /// Write one JSON line for each answer to this file; no text is in it
    #[arg(long, value_name = "FILE")]
    request_log: Option<PathBuf>,
    /// Put prompts and answers into the request log, too
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch())]
    log_text: Option<bool>,
    #[command(flatten)]
    answer: AnswerArgs,
}

impl ServeArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let config = self.answer.configure(EngineConfig::default())?;
        let server_config = self.server_config()?;
        // What is made for a check goes with it, also where the check fails.
        let _made = self.check.then(|| Made::by_opening([&config.cache_dir, &server_config.request_log]));
        self.try_log()?;
        let template = self.chat_template_file.as_deref().map(template).transpose()?;
        let (path, loaded) = self.answer.model.load(&config)?;
        let card = self.card(&path, &loaded, template);
        if card.chat_template.is_none() {
            note("the model has no chat template: chats are put as ChatML, which it may not know");
        }
        let engine = loaded.engine(&config)?;
        self.answer.note_unused(&engine);
        let about = format!(
            "{} by {} on {} prefill and {} decode workers of {} slots, {} tokens each",
            card.id,
            engine.policy_name(),
            config.prefill.n_workers(),
            config.decode.n_workers(),
            config.n_slots,
            engine.n_ctx_slot()
        );
        let document = json!({
            "model": card.id, "policy": engine.policy_name(), "prefill": config.prefill, "decode": config.decode,
            "slots": config.n_slots, "ctx": engine.n_ctx_slot(),
        });
        let is_open = !server_config.listen.ip().is_loopback() && server_config.api_keys.is_empty();
        if is_open {
            note("everyone who can reach this address can use the server: give it an --api-key");
        }
        let mut server = Server::new(engine.clone(), card, server_config)?;
        if let Some(path) = config.calibration.clone() {
            let (engine, loaded, config) = (engine.clone(), loaded.clone(), config.clone());
            server = server.on_reload(move || {
                let calibration = loaded.calibration(&config).map_err(|error| error.to_string())?;
                let calibration = calibration.ok_or("there is no calibration to read again")?;
                engine.set_calibration(calibration).map_err(|error| error.to_string())?;
                Ok(format!("requests are routed by {} as it is now", path.display()))
            });
        }
        if self.check {
            output.line(&format!("would serve {about}"))?;
            output.json(&document)?;
            engine.shutdown();
            return Ok(());
        }
        let mut told = Ok(());
        let ended = server.run(|address| {
            note(&format!("serving {about}, at http://{address}"));
            let mut document = document;
            document["url"] = format!("http://{address}").into();
            told = output.json(&document);
        })?;
        told?;
        if ended == Ended::AtOnce {
            note("ended at once; requests were cut short");
            end_now(1);
        }
        engine.shutdown();
        note(match ended {
            Ended::CutShort => "requests were cut short at the limit; good-bye",
            _ => "every request is answered; good-bye",
        });
        Ok(())
    }

    /// Opens the request log as the server will, and leaves nothing behind.
    fn try_log(&self) -> Result<(), CliError> {
        let Some(path) = &self.request_log else { return Ok(()) };
        let _made = Made::by_opening([&self.request_log]);
        let opened = fs::OpenOptions::new().create(true).append(true).open(path);
        opened.map(drop).map_err(|error| ServerError::RequestLog(path.clone(), error).into())
    }

    /// The files it writes, each with its option.
    pub fn outputs(&self) -> Vec<(&'static str, &Path)> {
        self.request_log.as_deref().map(|path| ("--request-log", path)).into_iter().collect()
    }

    fn server_config(&self) -> Result<ServerConfig, CliError> {
        let default = ServerConfig::default();
        let seconds = |given: Option<u64>, default: Option<Duration>| match given {
            None => default,
            Some(0) => None,
            Some(n) => Some(Duration::from_secs(n)),
        };
        let mut api_keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            api_keys.extend(keys_of(&read(path)?));
            if api_keys.is_empty() {
                return Err(CliError::input(format!("{} has no key in it; write one a line", path.display())));
            }
        }
        if api_keys.iter().any(String::is_empty) {
            return Err(CliError::usage("an API key is empty, which would let everyone in; give it some characters"));
        }
        if self.log_text.unwrap_or(false) && self.request_log.is_none() {
            return Err(CliError::usage("--log-text needs --request-log: there is no other place for texts"));
        }
        if self.alias.as_ref().is_some_and(String::is_empty) {
            return Err(CliError::usage("--alias is empty; give the model a name, or leave it out"));
        }
        let within = |given: Option<usize>, most: usize, default: usize, name: &str| match given {
            Some(n) if !(1..=most).contains(&n) => {
                Err(CliError::usage(format!("--{name} is {n}, which must be between 1 and {most}")))
            }
            other => Ok(other.unwrap_or(default)),
        };
        Ok(ServerConfig {
            listen: SocketAddr::new(self.host, self.port),
            api_keys,
            max_body: within(self.max_body, 1 << 20, default.max_body >> 20, "max-body")? << 20,
            max_connections: within(self.max_connections, 1 << 20, default.max_connections, "max-connections")?,
            max_choices: within(self.max_choices, 1 << 16, default.max_choices, "max-choices")?,
            queue_timeout: seconds(self.queue_timeout, default.queue_timeout),
            request_timeout: seconds(self.request_timeout, default.request_timeout),
            drain_timeout: self.drain_timeout.map_or(default.drain_timeout, Duration::from_secs),
            request_log: self.request_log.clone(),
            log_text: self.log_text.unwrap_or(false),
            ..default
        })
    }

    fn card(&self, path: &Path, loaded: &LoadedModel, template: Option<String>) -> ModelCard {
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned());
        let (bos, eos) = loaded.border_tokens();
        let facts = loaded.facts();
        ModelCard {
            id: self.alias.clone().or(name).unwrap_or_else(|| "model".to_owned()),
            chat_template: template.or_else(|| loaded.chat_template()),
            bos,
            eos,
            n_ctx_train: facts.n_ctx_train,
            n_params: facts.n_params,
            n_bytes: facts.size_bytes,
        }
    }
}

fn read(path: &Path) -> Result<String, CliError> {
    fs::read_to_string(path).map_err(|error| CliError::input(format!("cannot read {}: {error}", path.display())))
}

/// The chat template in a file; an empty one would make every chat an empty prompt.
fn template(path: &Path) -> Result<String, CliError> {
    let text = read(path)?;
    if text.trim().is_empty() {
        return Err(CliError::input(format!("{} is empty; write a chat template in it, in Jinja", path.display())));
    }
    Ok(text)
}

impl From<ServerError> for CliError {
    fn from(error: ServerError) -> Self {
        match error {
            ServerError::Threads(_) => Self::failed(error),
            _ => Self::input(error),
        }
    }
}

/// The keys of a key file's text.
fn keys_of(text: &str) -> impl Iterator<Item = String> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Symptom: the comment of a key file was a key that let everyone in who knew it.
    #[test]
    fn a_comment_in_a_key_file_is_no_key() {
        let keys: Vec<String> = keys_of("# of the team\n one \n\n  # old\ntwo#2\n").collect();
        assert_eq!(keys, ["one", "two#2"]);
    }
}
