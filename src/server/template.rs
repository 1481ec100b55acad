use std::{collections::BTreeMap, fmt::Write as _, io};

use minijinja::{Environment, Error, ErrorKind, Value as Jinja, syntax::SyntaxConfig, value::Kwargs};
use serde::{Deserialize as _, Serialize as _};
use serde_json::{
    Serializer, Value,
    ser::{Formatter, PrettyFormatter},
};

use super::{ServerError, config::ModelCard, error::ApiError};

/// The template of models that bring none, as in llama.cpp.
const CHAT_ML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
                       '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// Steps a template may take: a loop over a long conversation fits, an endless one does not.
const FUEL: u64 = 50_000_000;
const NAME: &str = "chat";

/// The model's chat template: messages in, prompt out.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// The template of the card, or `ChatML`.
    pub fn new(card: &ModelCard) -> Result<Self, ServerError> {
        let source = card.chat_template.clone().unwrap_or_else(|| CHAT_ML.to_owned());
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| ServerError::Template(sentence(&error)))?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Jinja, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| strftime(&format, super::app::now()));
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, source.clone())
            .map_err(|error| ServerError::Template(sentence(&error)))?;
        Ok(Self { environment, source, bos: card.bos.clone(), eos: card.eos.clone() })
    }

    /// Its text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for `messages`, which asks for the assistant's answer. `extra` are more names the template may know.
    /// The token in front of every prompt is left out: the tokenizer adds it.
    pub fn render(
        &self,
        messages: Vec<Jinja>,
        tools: Option<Jinja>,
        extra: BTreeMap<String, Jinja>,
    ) -> Result<String, ApiError> {
        let mut context = extra;
        context.entry("add_generation_prompt".to_owned()).or_insert(Jinja::from(true));
        context.insert("messages".to_owned(), Jinja::from(messages));
        context.extend(tools.map(|tools| ("tools".to_owned(), tools)));
        context.insert("bos_token".to_owned(), Jinja::from(self.bos.as_str()));
        context.insert("eos_token".to_owned(), Jinja::from(self.eos.as_str()));
        let template = self.environment.get_template(NAME).map_err(|error| ApiError::failed(sentence(&error)))?;
        let prompt = template.render(Jinja::from_pairs(context)).map_err(|error| {
            ApiError::invalid("messages", format!("the model's chat template refuses them: {}", sentence(&error)))
        })?;
        let starts_twice = !self.bos.is_empty() && prompt.starts_with(&self.bos);
        Ok(if starts_twice { prompt[self.bos.len()..].to_owned() } else { prompt })
    }
}

/// A value of a request as the template sees it.
pub(super) fn to_jinja(value: &Value) -> Jinja {
    // A value without a place to fail in can not fail.
    Jinja::deserialize(value).unwrap_or_default()
}

fn sentence(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    error.line().map_or(what.clone(), |line| format!("{what} (line {line} of the template)"))
}

/// As Python's `json.dumps`, which the templates were written for: a space after comma and colon, keys as they came, no
/// escapes for HTML.
#[expect(clippy::needless_pass_by_value, reason = "a filter's options are its own")]
fn to_json(value: &Jinja, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut text = Vec::new();
    let written = match indent.map(|width| vec![b' '; width.min(16)]) {
        Some(indent) => {
            value.serialize(&mut Serializer::with_formatter(&mut text, PrettyFormatter::with_indent(&indent)))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut text, Spaced)),
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// `json.dumps` without an indent.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// The day and time of `seconds` since 1970, UTC, by the conversions that chat templates use.
fn strftime(format: &str, seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let name = MONTHS[month as usize - 1];
    let weekday = DAYS[(days % 7) as usize];
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        let number = match (c, chars.as_str().chars().next()) {
            ('%', Some('m')) => month,
            ('%', Some('d')) => day,
            ('%', Some('H')) => second / 3600,
            ('%', Some('M')) => second / 60 % 60,
            ('%', Some('S')) => second % 60,
            ('%', Some(word)) => {
                chars.next();
                match word {
                    'Y' => text.push_str(&year.to_string()),
                    'B' => text.push_str(name),
                    'b' => text.push_str(&name[..3]),
                    'A' => text.push_str(weekday),
                    'a' => text.push_str(&weekday[..3]),
                    '%' => text.push('%'),
                    other => text.extend(['%', other]),
                }
                continue;
            }
            _ => {
                text.push(c);
                continue;
            }
        };
        chars.next();
        // Writing to a string does not fail.
        let _ = write!(text, "{number:02}");
    }
    text
}

/// Year, month and day of the n-th day since 1970 (Hinnant's `civil_from_days`).
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day_of_year - (153 * shifted + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(template: &str, messages: &str, tools: &str) -> Result<String, ApiError> {
        let card = ModelCard {
            chat_template: Some(template.to_owned()),
            bos: "<s>".to_owned(),
            eos: "</s>".to_owned(),
            ..ModelCard::default()
        };
        let messages = serde_json::from_str(messages).expect("messages");
        let tools = serde_json::from_str(tools).expect("tools");
        ChatTemplate::new(&card).expect("a template").render(messages, tools, BTreeMap::new())
    }

    #[test]
    fn a_model_without_a_template_gets_chat_ml() {
        let template = ChatTemplate::new(&ModelCard::default()).expect("a template");
        let messages = serde_json::from_str(r#"[{"role": "user", "content": "hi"}]"#).expect("messages");
        let prompt = template.render(messages, None, BTreeMap::new());
        assert_eq!(prompt, Ok("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n".to_owned()));
    }

    #[test]
    fn what_templates_call_is_there() {
        let messages = r#"[{"role": "user", "content": " a.b "}]"#;
        let tools = r#"[{"b": 1, "a": [true, "<x>"]}]"#;
        let template = "{{ bos_token }}{% for m in messages %}{{ m.content.strip().split('.')|join('-') }}{{ eos_token }}\
                        {% endfor %}{% if tools %}{{ tools|tojson }}{% endif %}{% if x is defined %}no{% endif %}";
        assert_eq!(render(template, messages, tools), Ok(format!("a-b</s>{tools}")));
        let indented = "{{ {'a': [1], 'b': {}}|tojson(indent=2) }}";
        let want = "{\n  \"a\": [\n    1\n  ],\n  \"b\": {}\n}";
        assert_eq!(render(indented, messages, "null"), Ok(want.to_owned()));
    }

    #[test]
    fn what_a_template_refuses_is_the_messages_fault() {
        let error = render("{{ raise_exception('roles must alternate') }}", "[]", "null").expect_err("raised");
        assert_eq!(error.param.as_deref(), Some("messages"));
        assert!(error.message.contains("roles must alternate"), "{}", error.message);
        let endless = "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}";
        assert!(render(endless, "[]", "null").is_err(), "runs out of fuel");
    }

    #[test]
    fn days_have_dates() {
        assert_eq!(
            strftime("%d %b %Y %B %A %H:%M:%S %% %q", 951_827_696),
            "29 Feb 2000 February Tuesday 12:34:56 % %q"
        );
        assert_eq!(strftime("%Y-%m-%d %a", 1_798_675_200), "2026-12-31 Thu");
        assert_eq!(strftime("%Y-%m-%d", 0), "1970-01-01");
    }
}
