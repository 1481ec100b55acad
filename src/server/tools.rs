use serde_json::{Map, Value};

use super::output::{Call, Delta};
use crate::engine::StopFilter;

/// How a family of models writes function calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen.
    Tagged,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen Coder.
    Xml,
    /// `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, or `[TOOL_CALLS]name[ARGS]{..}`: Mistral.
    Mistral,
    /// `{"name": .., "parameters": {..}}`, perhaps after `<|python_tag|>`, and nothing else: Llama 3.
    Bare,
}

impl CallFormat {
    /// The format that a chat template teaches, by the words in it.
    pub fn of_template(template: &str) -> Self {
        let has = |word: &str| template.contains(word);
        match () {
            () if has("<function=") => Self::Xml,
            () if has("[TOOL_CALLS]") => Self::Mistral,
            () if has("<|python_tag|>") || (has("\"parameters\"") && !has("<tool_call>")) => Self::Bare,
            () => Self::Tagged,
        }
    }

    /// What stands around one call and names its arguments, for a grammar that makes a model call; none where such a call
    /// is not JSON.
    pub fn frame(self) -> Option<[&'static str; 3]> {
        match self {
            Self::Tagged => Some(["<tool_call>\n", "arguments", "\n</tool_call>"]),
            Self::Mistral => Some(["[TOOL_CALLS][", "arguments", "]"]),
            Self::Bare => Some(["", "parameters", ""]),
            Self::Xml => None,
        }
    }

    fn borders(self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::Tagged | Self::Xml => ("<tool_call>", Some("</tool_call>")),
            Self::Mistral => ("[TOOL_CALLS]", None),
            Self::Bare => ("<|python_tag|>", None),
        }
    }
}

/// Finds function calls in an answer.
#[derive(Debug)]
pub(super) struct ToolParser {
    format: CallFormat,
    state: State,
}

#[derive(Debug)]
enum State {
    /// White space, perhaps before a bare call.
    Start(String),
    Content(StopFilter),
    Call {
        body: String,
        close: StopFilter,
    },
    /// After a call: white space before the next one says nothing.
    Between(String),
}

impl ToolParser {
    pub fn new(format: CallFormat) -> Self {
        let state = if format == CallFormat::Bare { State::Start(String::new()) } else { content(format) };
        Self { format, state }
    }

    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        let mut deltas = Vec::new();
        let mut text = text.to_owned();
        while !text.is_empty() {
            text = self.step(&text, &mut deltas);
        }
        deltas
    }

    pub fn finish(&mut self) -> Vec<Delta> {
        match &mut self.state {
            State::Start(_) | State::Between(_) => Vec::new(),
            State::Content(open) => vec![Delta::Content(open.finish())],
            State::Call { body, close } => {
                let (body, mark) = (std::mem::take(body), close.finish());
                self.calls(&body, End::Cut(&mark))
            }
        }
    }

    /// Takes text as far as the state reaches; gives the rest.
    fn step(&mut self, text: &str, deltas: &mut Vec<Delta>) -> String {
        match &mut self.state {
            State::Start(held) => {
                held.push_str(text);
                let all = std::mem::take(held);
                match all.trim_start().chars().next() {
                    None => *held = all,
                    Some('{') => self.state = call(self.format, all),
                    Some(_) => {
                        self.state = content(self.format);
                        return all;
                    }
                }
                String::new()
            }
            State::Content(open) => {
                let released = open.push(text);
                deltas.push(Delta::Content(released.text));
                if released.hit.is_none() {
                    return String::new();
                }
                let rest = open.finish();
                self.state = call(self.format, String::new());
                rest
            }
            State::Call { body, close } => {
                let released = close.push(text);
                body.push_str(&released.text);
                if released.hit.is_none() {
                    return String::new();
                }
                let (body, rest) = (std::mem::take(body), close.finish());
                deltas.extend(self.calls(&body, End::Closed));
                self.state = State::Between(String::new());
                rest
            }
            State::Between(held) => {
                held.push_str(text);
                if held.trim_start().is_empty() {
                    return String::new();
                }
                let rest = held.trim_start().to_owned();
                self.state = content(self.format);
                rest
            }
        }
    }

    /// The calls of `body`; what can not be read as calls is the text it is.
    fn calls(&self, body: &str, end: End<'_>) -> Vec<Delta> {
        let calls = match self.format {
            CallFormat::Tagged | CallFormat::Bare => parse_json(body).and_then(|value| json_calls(&value)),
            // A call without its end may still have got more parameters.
            CallFormat::Xml if end != End::Closed && !body.trim_end().ends_with("</function>") => None,
            CallFormat::Xml => xml_call(body).map(|call| vec![call]).or_else(|| json_calls(&parse_json(body)?)),
            CallFormat::Mistral => {
                let (calls, rest) = mistral_calls(body);
                let calls = calls.into_iter().map(Delta::Call);
                let rest = Some(rest).filter(|rest| !rest.trim().is_empty());
                let deltas: Vec<Delta> = calls.chain(rest.map(|rest| Delta::Content(rest.to_owned()))).collect();
                // Without any it is all text, with its opening word.
                if matches!(deltas[..], [Delta::Call(_), ..]) {
                    return deltas;
                }
                None
            }
        };
        let (open, close) = self.format.borders();
        let as_text = || match (close, end) {
            (Some(close), End::Closed) => format!("{open}{body}{close}"),
            (_, End::Cut(mark)) if self.format != CallFormat::Bare => format!("{open}{body}{mark}"),
            _ => body.to_owned(),
        };
        calls.map_or_else(|| vec![Delta::Content(as_text())], |calls| calls.into_iter().map(Delta::Call).collect())
    }
}

/// How the text of a call ended: with its closing mark, or with so much of it as was written when all text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End<'a> {
    Closed,
    Cut(&'a str),
}

fn content(format: CallFormat) -> State {
    State::Content(StopFilter::new(vec![format.borders().0.to_owned()]))
}

fn call(format: CallFormat, body: String) -> State {
    State::Call { body, close: StopFilter::new(format.borders().1.map(str::to_owned).into_iter().collect()) }
}

fn parse_json(text: &str) -> Option<Value> {
    serde_json::from_str(text.trim()).ok()
}

/// One call, or a list of them, as JSON.
fn json_calls(value: &Value) -> Option<Vec<Call>> {
    match value {
        Value::Array(calls) if !calls.is_empty() => calls.iter().map(json_call).collect(),
        one => Some(vec![json_call(one)?]),
    }
}

/// The calls that are whole, and the text behind them, where one may be cut off.
fn mistral_calls(body: &str) -> (Vec<Call>, &str) {
    match body.trim_start().strip_prefix('[') {
        Some(list) => listed_calls(list),
        None => match parse_json(body).and_then(|value| json_calls(&value)) {
            Some(calls) => (calls, ""),
            None => named_calls(body),
        },
    }
}

/// `{"name": ..}, {"name": ..}]`.
fn listed_calls(list: &str) -> (Vec<Call>, &str) {
    let (mut calls, mut rest) = (Vec::new(), list);
    loop {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let Some(call) = values.next().and_then(Result::ok).and_then(|value| json_call(&value)) else {
            return (calls, rest);
        };
        calls.push(call);
        rest = rest[values.byte_offset()..].trim_start();
        match rest.strip_prefix(',') {
            Some(next) => rest = next,
            None => return (calls, rest.strip_prefix(']').unwrap_or(rest)),
        }
    }
}

fn json_call(value: &Value) -> Option<Call> {
    let name = value.get("name")?.as_str()?;
    let arguments = value.get("arguments").or_else(|| value.get("parameters"));
    let arguments = match arguments {
        None => "{}".to_owned(),
        // Some models write the text instead of the object.
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    Some(Call::new(name, arguments))
}

/// `<function=name><parameter=key>value</parameter>..</function>`; a value that is JSON is taken as such.
fn xml_call(body: &str) -> Option<Call> {
    let (name, mut rest) = body.split_once("<function=")?.1.split_once('>')?;
    let mut arguments = Map::new();
    while let Some((_, parameter)) = rest.split_once("<parameter=") {
        let (key, value) = parameter.split_once('>')?;
        let (value, behind) = value.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let parsed = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        arguments.insert(key.trim().to_owned(), parsed);
        rest = behind;
    }
    Some(Call::new(name.trim(), Value::Object(arguments).to_string()))
}

/// `name[ARGS]{..}`, several of them parted by the opening word.
fn named_calls(body: &str) -> (Vec<Call>, &str) {
    let open = CallFormat::Mistral.borders().0;
    let (mut calls, mut rest) = (Vec::new(), body);
    let mut next = Some(body);
    while let Some(text) = next {
        let end = text.find(open).unwrap_or(text.len());
        let Some((call, n_bytes)) = named_call(&text[..end]) else { break };
        calls.push(call);
        rest = text[n_bytes..].trim_start();
        next = rest.strip_prefix(open);
    }
    (calls, rest)
}

/// The call that `text` begins with, and its bytes.
fn named_call(text: &str) -> Option<(Call, usize)> {
    let (name, arguments) = text.split_once("[ARGS]").or_else(|| Some(text.split_at(text.find('{')?)))?;
    let mut values = serde_json::Deserializer::from_str(arguments).into_iter::<Value>();
    let call = Call::new(name.trim(), values.next()?.ok()?.to_string());
    Some((call, text.len() - arguments.len() + values.byte_offset()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Content and calls (name, arguments), with the text cut into pieces of `n` characters.
    fn read(format: CallFormat, text: &str, n: usize) -> (String, Vec<(String, String)>) {
        let mut parser = ToolParser::new(format);
        let chars: Vec<char> = text.chars().collect();
        let mut deltas: Vec<Delta> =
            chars.chunks(n).flat_map(|piece| parser.push(&piece.iter().collect::<String>())).collect();
        deltas.extend(parser.finish());
        let (mut content, mut calls) = (String::new(), Vec::new());
        for delta in deltas {
            match delta {
                Delta::Content(text) | Delta::Reasoning(text) => content.push_str(&text),
                Delta::Call(call) => calls.push((call.name, call.arguments)),
            }
        }
        (content, calls)
    }

    #[test]
    fn calls_are_found_in_every_format_however_the_text_is_cut() {
        let weather = ("weather", r#"{"city":"Oslo"}"#);
        let time = ("time", "{}");
        for (format, text, content, calls) in [
            (
                CallFormat::Tagged,
                "Let me see.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>\n\
                 <tool_call>{\"name\": \"time\"}</tool_call>\n",
                "Let me see.",
                vec![weather, time],
            ),
            (CallFormat::Tagged, "1 < 2 <tool", "1 < 2 <tool", vec![]),
            (CallFormat::Tagged, "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", vec![]),
            (
                CallFormat::Xml,
                "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
                "",
                vec![weather],
            ),
            (
                CallFormat::Mistral,
                "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}, {\"name\": \"time\"}]",
                "",
                vec![weather, time],
            ),
            (CallFormat::Mistral, "ok [TOOL_CALLS]weather[ARGS]{\"city\": \"Oslo\"}", "ok ", vec![weather]),
            (CallFormat::Bare, "\n{\"name\": \"weather\", \"parameters\": {\"city\": \"Oslo\"}}", "", vec![weather]),
            (CallFormat::Bare, "<|python_tag|>{\"name\": \"time\", \"parameters\": {}}", "", vec![time]),
            (CallFormat::Bare, "{a set}", "{a set}", vec![]),
            (CallFormat::Bare, "plain", "plain", vec![]),
        ] {
            let calls: Vec<_> = calls.iter().map(|&(name, args)| (name.to_owned(), args.to_owned())).collect();
            for n in 1..30 {
                assert_eq!(read(format, text, n), (content.to_owned(), calls.clone()), "{text:?} in pieces of {n}");
            }
        }
    }

    // Symptom: an answer cut at `max_tokens` inside `</tool_call>` was text with a closing tag that the model never wrote,
    // and the call, all of which was there, was lost.
    #[test]
    fn a_cut_answer_has_its_finished_calls_and_no_text_but_the_model_s() {
        let json = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":\n 100 }}\n</tool_call>";
        let xml = "<tool_call>\n<function=f>\n<parameter=a>\n100\n</parameter>\n</function>\n</tool_call>";
        let list = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 100}}]";
        let named = "[TOOL_CALLS]f[ARGS]{\"a\": 100}";
        let bare = "{\"name\": \"f\", \"parameters\": {\"a\": 100}}";
        for (format, text, done) in [
            (CallFormat::Tagged, json, "}}"),
            (CallFormat::Xml, xml, "</function>"),
            (CallFormat::Mistral, list, "}}"),
            (CallFormat::Mistral, named, "}"),
            (CallFormat::Bare, bare, "}}"),
        ] {
            let finished = text.find(done).expect("an end") + done.len();
            for cut in 0..=text.len() {
                let want = match cut {
                    cut if cut >= finished => (String::new(), vec![("f".to_owned(), "{\"a\":100}".to_owned())]),
                    cut => (text[..cut].to_owned(), Vec::new()),
                };
                for n in [1, 3, 100] {
                    assert_eq!(read(format, &text[..cut], n), want, "{text:?} cut at {cut}, in pieces of {n}");
                }
            }
        }
    }

    // Symptom: in Mistral's formats a finished call was text if the one behind it was cut.
    #[test]
    fn the_finished_calls_of_mistral_s_formats_are_calls_whatever_is_behind_them() {
        let call = |name: &str| (name.to_owned(), "{\"a\":100}".to_owned());
        for (first, mark, second, end) in [
            (
                "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 100}}",
                ", ",
                "{\"name\": \"g\", \"arguments\": {\"a\": 100}}",
                "]",
            ),
            ("[TOOL_CALLS]f[ARGS]{\"a\": 100}", "", "[TOOL_CALLS]g[ARGS]{\"a\": 100}", ""),
        ] {
            for cut in 0..second.len() {
                let (content, calls) = read(CallFormat::Mistral, &format!("{first}{mark}{}", &second[..cut]), 7);
                assert_eq!((content.trim_start(), calls), (&second[..cut], vec![call("f")]), "cut at {cut}");
            }
            let whole = read(CallFormat::Mistral, &format!("{first}{mark}{second}{end}"), 7);
            assert_eq!(whole, (String::new(), vec![call("f"), call("g")]));
        }
        let (content, calls) = read(CallFormat::Mistral, "[TOOL_CALLS][{\"name\": \"f\"}] as you said", 3);
        assert_eq!((content.as_str(), calls.len()), (" as you said", 1));
        let text = "[TOOL_CALLS][{\"nome\": \"f\"}]";
        assert_eq!(read(CallFormat::Mistral, text, 3), (text.to_owned(), Vec::new()));
    }

    #[test]
    fn a_template_tells_its_format() {
        assert_eq!(CallFormat::of_template("<tool_call> {\"name\"} \"parameters\""), CallFormat::Tagged);
        assert_eq!(CallFormat::of_template("<tool_call><function=x>"), CallFormat::Xml);
        assert_eq!(CallFormat::of_template("[TOOL_CALLS]"), CallFormat::Mistral);
        assert_eq!(CallFormat::of_template("\"parameters\""), CallFormat::Bare);
    }
}
