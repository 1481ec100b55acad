use std::collections::BTreeMap;

use minijinja::Value as Jinja;
use serde_json::{Value, json};

use super::{
    error::ApiError,
    fields::{Fields, wrong_kind},
    schema,
    template::to_jinja,
    tools::CallFormat,
};

/// Messages of a conversation, and functions a model may call, at most.
const MAX_MESSAGES: usize = 4096;
const MAX_TOOLS: usize = 128;
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Whether and which function is to be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ToolChoice {
    None,
    Auto,
    /// Some function.
    Required,
    /// This one.
    Named(String),
}

impl ToolChoice {
    /// Whether the model is told of the functions.
    pub fn offers(&self) -> bool {
        *self != Self::None
    }
}

/// The messages as a chat template wants them: text as one string, arguments of calls as objects. What users and tools
/// say goes through `plain` first.
pub(super) fn read(fields: &Fields<'_>, plain: &dyn Fn(&str) -> String) -> Result<Vec<Jinja>, ApiError> {
    fields.required("messages")?;
    let messages = fields.list("messages")?.unwrap_or_default();
    if messages.is_empty() || messages.len() > MAX_MESSAGES {
        let n = messages.len();
        return Err(ApiError::invalid(
            "messages",
            format!("messages has {n} messages; 1 to {MAX_MESSAGES} are allowed"),
        ));
    }
    messages.iter().enumerate().map(|(at, message)| read_message(message, &format!("messages[{at}]"), plain)).collect()
}

fn read_message(message: &Value, path: &str, plain: &dyn Fn(&str) -> String) -> Result<Jinja, ApiError> {
    let fields = Fields::of(message, path)?;
    fields.required("role")?;
    let role = fields.text("role")?.unwrap_or_default();
    if !ROLES.contains(&role) {
        let path = fields.path("role");
        let why = format!("{path} is {role:?}; the roles are {}", ROLES.join(", "));
        return Err(ApiError::invalid(&path, why));
    }
    let is_strangers = matches!(role, "user" | "tool");
    let said = |text: &str| Jinja::from(if is_strangers { plain(text) } else { text.to_owned() });
    let mut read: BTreeMap<String, Jinja> = BTreeMap::new();
    // Templates know the older name.
    read.insert("role".to_owned(), Jinja::from(if role == "developer" { "system" } else { role }));
    let calls = fields.list("tool_calls")?.unwrap_or_default();
    let content = content(&fields)?;
    if content.is_none() && calls.is_empty() {
        fields.required("content")?;
    }
    read.insert("content".to_owned(), said(&content.unwrap_or_default()));
    for name in ["name", "tool_call_id", "reasoning_content"] {
        if let Some(text) = fields.text(name)? {
            read.insert(name.to_owned(), said(text));
        }
    }
    if !calls.is_empty() {
        let path = fields.path("tool_calls");
        let calls = calls.iter().enumerate().map(|(at, call)| read_call(call, &format!("{path}[{at}]")));
        read.insert("tool_calls".to_owned(), calls.collect::<Result<Vec<Jinja>, _>>()?.into());
    }
    Ok(Jinja::from_pairs(read))
}

/// A string, or a list of parts that are text.
fn content(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let path = fields.path("content");
    match fields.get("content") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (at, part) in parts.iter().enumerate() {
                let part = Fields::of(part, &format!("{path}[{at}]"))?;
                if part.text("type")? != Some("text") {
                    let path = part.path("type");
                    let why = format!("{path} must be text: this server reads nothing else");
                    return Err(ApiError::invalid(&path, why));
                }
                part.required("text")?;
                text.push_str(part.text("text")?.unwrap_or_default());
            }
            Ok(Some(text))
        }
        Some(other) => Err(wrong_kind(&path, "a string or a list of parts", other)),
    }
}

fn read_call(call: &Value, path: &str) -> Result<Jinja, ApiError> {
    let fields = Fields::of(call, path)?;
    fields.required("function")?;
    let function = fields.object("function")?.unwrap_or_else(|| fields.clone());
    function.required("name")?;
    let name = function.text("name")?.unwrap_or_default();
    let arguments = match function.get("arguments") {
        None => Jinja::from_pairs(BTreeMap::<String, Jinja>::new()),
        // What is no JSON is given to the template as the text it is.
        Some(Value::String(text)) => serde_json::from_str(text).unwrap_or_else(|_| Jinja::from(text.as_str())),
        Some(object) => to_jinja(object),
    };
    let function = [("name".to_owned(), Jinja::from(name)), ("arguments".to_owned(), arguments)];
    let id = fields.text("id")?.unwrap_or_default();
    Ok(Jinja::from_pairs([
        ("id".to_owned(), Jinja::from(id)),
        ("type".to_owned(), Jinja::from("function")),
        ("function".to_owned(), Jinja::from_pairs(function)),
    ]))
}

/// The functions a model may call, checked.
pub(super) fn tools<'a>(fields: &Fields<'a>) -> Result<&'a [Value], ApiError> {
    let tools = fields.list("tools")?.unwrap_or_default();
    if tools.len() > MAX_TOOLS {
        let n = tools.len();
        return Err(ApiError::invalid("tools", format!("tools has {n} functions; {MAX_TOOLS} are allowed")));
    }
    for (at, tool) in tools.iter().enumerate() {
        let tool = Fields::of(tool, &format!("tools[{at}]"))?;
        if tool.text("type")?.is_some_and(|kind| kind != "function") {
            let path = tool.path("type");
            return Err(ApiError::invalid(&path, format!("{path} must be function")));
        }
        tool.required("function")?;
        if let Some(function) = tool.object("function")? {
            function.required("name")?;
            function.text("name")?;
            function.object("parameters")?;
        }
    }
    Ok(tools)
}

/// The grammar of one call of the functions that `choice` demands, if it demands any.
pub(super) fn forced_call(
    tools: &[Value],
    choice: &ToolChoice,
    format: CallFormat,
) -> Result<Option<String>, ApiError> {
    let wanted = match choice {
        ToolChoice::None | ToolChoice::Auto => return Ok(None),
        ToolChoice::Required => None,
        ToolChoice::Named(name) => Some(name.as_str()),
    };
    let any = json!({ "type": "object" });
    let functions = tools.iter().enumerate().filter_map(|(at, tool)| {
        let function = tool.get("function")?;
        // A function without parameters still has an object of them.
        let says = |schema: &&Value| schema.as_object().is_some_and(|map| !map.is_empty());
        let schema = function.get("parameters").filter(says).unwrap_or(&any);
        Some((function.get("name")?.as_str()?, schema, format!("tools[{at}].function.parameters")))
    });
    let functions: Vec<_> = functions.filter(|(name, ..)| wanted.is_none_or(|wanted| wanted == *name)).collect();
    if functions.is_empty() {
        let name = wanted.unwrap_or_default();
        return Err(ApiError::invalid(
            "tool_choice",
            format!("tool_choice names {name:?}, which is not among the tools"),
        ));
    }
    let frame = format.frame().ok_or_else(|| {
        ApiError::invalid("tool_choice", "this model writes calls in a way that can not be enforced; use auto")
    })?;
    schema::call(&functions, frame).map(Some)
}

/// What `tool_choice` asks for.
pub(super) fn tool_choice(fields: &Fields<'_>, has_tools: bool) -> Result<ToolChoice, ApiError> {
    let choice = match fields.get("tool_choice") {
        None => ToolChoice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => {
                let why = format!("tool_choice is {word:?}; it must be none, auto, required or a function");
                return Err(ApiError::invalid("tool_choice", why));
            }
        },
        Some(_) => {
            let choice = fields.object("tool_choice")?.unwrap_or_else(|| fields.clone());
            choice.required("function")?;
            let function = choice.object("function")?.unwrap_or_else(|| choice.clone());
            function.required("name")?;
            ToolChoice::Named(function.text("name")?.unwrap_or_default().to_owned())
        }
    };
    if !has_tools && matches!(choice, ToolChoice::Required | ToolChoice::Named(_)) {
        return Err(ApiError::invalid("tool_choice", "tool_choice wants a call, and tools has no functions"));
    }
    Ok(choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields_of(body: &Value) -> Fields<'_> {
        Fields::of(body, "").expect("an object")
    }

    #[test]
    fn messages_become_what_templates_want() {
        let body = json!({"messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        ]});
        let messages = read(&fields_of(&body), &str::to_owned).expect("messages");
        assert_eq!(messages[0].get_attr("role").expect("a role").as_str(), Some("system"));
        assert_eq!(messages[0].get_attr("content").expect("content").as_str(), Some("be kind"));
        let call = messages[1].get_attr("tool_calls").and_then(|calls| calls.get_item_by_index(0)).expect("a call");
        let arguments =
            call.get_attr("function").and_then(|function| function.get_attr("arguments")).expect("arguments");
        assert_eq!(arguments.get_attr("x").expect("x").as_i64(), Some(1));
    }

    #[test]
    fn wrong_messages_are_named() {
        for (messages, param) in [
            (json!(null), "messages"),
            (json!([]), "messages"),
            (json!("hi"), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "king", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 1}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content[0].type"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
            (json!([{"role": "assistant", "tool_calls": [{}]}]), "messages[0].tool_calls[0].function"),
        ] {
            let body = json!({ "messages": messages });
            let error = read(&fields_of(&body), &str::to_owned).expect_err(param);
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn a_choice_of_function_needs_functions() {
        let choice = |choice: Value, has_tools| tool_choice(&fields_of(&json!({ "tool_choice": choice })), has_tools);
        assert_eq!(choice(json!(null), false), Ok(ToolChoice::Auto));
        assert_eq!(choice(json!("none"), true), Ok(ToolChoice::None));
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(choice(named.clone(), true), Ok(ToolChoice::Named("f".to_owned())));
        assert!(
            choice(named, false).is_err() && choice(json!("maybe"), true).is_err() && choice(json!({}), true).is_err()
        );
    }
}
