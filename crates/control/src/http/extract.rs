//! Reading requests: JSON bodies with a bound and an error that names the field; queries that know their parameters.

use std::time::Duration;

use axum::extract::{FromRequest, FromRequestParts, Request};
use futures::StreamExt as _;
use http::request::Parts;
use http::{HeaderMap, Uri, header};
use serde::de::DeserializeOwned;
use space_api::Problem;
use space_api::problem::Code;
use space_core::limits;

use super::error::Failed;
use crate::validate::invalid;

/// A client gets this long to send a JSON body.
const BODY_TIME: Duration = Duration::from_secs(30);
/// So much of a body that is too long is still read.
const READ_ON_MAX_BYTES: usize = 16 * 1024 * 1024;
/// Every key that a sandbox can have, and what else there is to ask.
const PARAMS_MAX: usize = limits::METADATA_KEYS_MAX + 16;

/// A JSON body that must be there.
pub struct Body<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Failed;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failed> {
        check_content_type(request.headers())?;
        let Ok(bytes) = tokio::time::timeout(BODY_TIME, collect(request.into_body())).await else {
            return Err(Problem::new(Code::Timeout, "the body did not arrive within 30 s").into());
        };
        Ok(Self(from_json(&bytes?)?))
    }
}

/// The variable parts of the path.
pub struct Path<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = Failed;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failed> {
        match axum::extract::Path::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(value)) => Ok(Self(value)),
            Err(_) => Err(invalid("path", "the path of the request is not valid UTF-8 after decoding").into()),
        }
    }
}

fn check_content_type(headers: &HeaderMap) -> Result<(), Problem> {
    let given = headers.get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or(""));
    let kind = given.unwrap_or("").split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    if kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json")) {
        return Ok(());
    }
    Err(Problem::new(Code::UnsupportedMediaType, "the body must be JSON, sent with Content-Type: application/json"))
}

/// The body, when it is short enough. A longer one is read on for a while and thrown away: a client that is still sending
/// would otherwise see a broken connection in place of the answer.
async fn collect(body: axum::body::Body) -> Result<Vec<u8>, Problem> {
    let mut parts = body.into_data_stream();
    let (mut kept, mut total) = (Vec::new(), 0);
    while let Some(part) = parts.next().await {
        let part = part.map_err(|_| Problem::new(Code::InvalidRequest, "the body broke off before its end"))?;
        total += part.len();
        if total <= limits::JSON_BODY_MAX_BYTES {
            kept.extend_from_slice(&part);
        } else if total > READ_ON_MAX_BYTES {
            break;
        }
    }
    if total <= limits::JSON_BODY_MAX_BYTES {
        return Ok(kept);
    }
    let max = limits::JSON_BODY_MAX_BYTES;
    Err(Problem::new(Code::TooLarge, format!("a JSON body has at most {max} bytes")))
}

/// Unknown fields are refused by the types; nesting is bounded by the parser (128).
pub fn from_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let mut parser = serde_json::Deserializer::from_slice(bytes);
    let value: T = serde_path_to_error::deserialize(&mut parser).map_err(|error| {
        let path = error.path().to_string();
        let text: String = error.inner().to_string().chars().take(500).collect();
        let problem = Problem::new(Code::InvalidRequest, format!("the body is not what is expected here: {text}"));
        if path == "." { problem } else { problem.at(path) }
    })?;
    parser.end().map_err(|_| Problem::new(Code::InvalidRequest, "there is something after the JSON of the body"))?;
    Ok(value)
}

/// The query of a request: each parameter at most once, none that is not known, UTF-8 after decoding.
pub struct Params(Vec<(String, String)>);

impl Params {
    /// `allowed` ending with `.` allows every name that starts so, any number of times.
    pub fn parse(uri: &Uri, allowed: &[&str]) -> Result<Self, Problem> {
        let mut pairs: Vec<(String, String)> = Vec::new();
        for part in uri.query().unwrap_or("").split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let name = decode(name).ok_or_else(|| invalid("query", "the name of a parameter is not valid UTF-8"))?;
            let value =
                decode(value).ok_or_else(|| invalid(&name, format!("{name} is not valid UTF-8 after decoding")))?;
            let known = allowed.iter().any(|a| *a == name || (a.ends_with('.') && name.starts_with(a)));
            if !known {
                let shown: String = name.chars().take(80).collect();
                let list = allowed.join(", ").replace("., ", ".KEY, ");
                return Err(invalid(&shown, format!("there is no parameter {shown:?} here; there are: {list}")));
            }
            if pairs.iter().any(|(n, _)| *n == name) {
                return Err(invalid(&name, format!("{name} is given twice")));
            }
            if pairs.len() == PARAMS_MAX {
                return Err(invalid("query", format!("a query has at most {PARAMS_MAX} parameters")));
            }
            pairs.push((name, value));
        }
        Ok(Self(pairs))
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    pub fn starting_with(&self, prefix: &str) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().filter_map(move |(n, v)| n.strip_prefix(prefix).map(|rest| (rest, v.as_str())))
    }

    pub fn number(&self, name: &str, max: u64) -> Result<Option<u64>, Problem> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse::<u64>() {
            Ok(n) if n <= max && text.bytes().all(|b| b.is_ascii_digit()) => Ok(Some(n)),
            _ => Err(invalid(name, format!("{name} is a whole number of at most {max}"))),
        }
    }

    pub fn flag(&self, name: &str) -> Result<bool, Problem> {
        match self.text(name) {
            None | Some("false" | "0") => Ok(false),
            Some("true" | "1" | "") => Ok(true),
            Some(_) => Err(invalid(name, format!("{name} is true or false"))),
        }
    }

    /// `?wait=` in seconds.
    pub fn wait(&self) -> Result<Option<Duration>, Problem> {
        Ok(self.number("wait", limits::WAIT_MAX_SECONDS)?.map(Duration::from_secs))
    }

    pub fn limit(&self) -> Result<u32, Problem> {
        match self.number("limit", limits::PAGE_MAX.into())? {
            Some(0) => Err(invalid("limit", "limit is at least 1")),
            given => Ok(given.map_or(limits::PAGE_DEFAULT, |n| u32::try_from(n).unwrap_or(limits::PAGE_MAX))),
        }
    }
}

/// `%XX` and `+`; `None` when the result is not UTF-8 or an escape is cut short.
fn decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit = |b: Option<u8>| char::from(b?).to_digit(16);
                let (high, low) = (digit(bytes.next())?, digit(bytes.next())?);
                u8::try_from(high * 16 + low).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str) -> Result<Params, Problem> {
        let uri = format!("/x?{query}").parse().expect("a URI");
        Params::parse(&uri, &["path", "wait", "metadata."])
    }

    #[test]
    fn queries_are_strict() {
        let params = parse("path=%2Fa+b%C3%A4&wait=30&metadata.k/1=v").expect("good");
        assert_eq!(params.text("path"), Some("/a bä"));
        assert_eq!(params.wait().expect("a number"), Some(Duration::from_secs(30)));
        assert_eq!(params.starting_with("metadata.").collect::<Vec<_>>(), [("k/1", "v")]);
        for bad in ["paht=x", "path=%ff", "path=%4", "path=a&path=b", "%ff=1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let many = |count| (0..count).map(|n| format!("metadata.{n}=&")).collect::<String>();
        assert!(parse(&many(PARAMS_MAX)).is_ok() && parse(&many(PARAMS_MAX + 1)).is_err());
        for bad in ["wait=-1", "wait=301", "wait=x", "wait=%2B1", "wait=", "wait=99999999999999999999"] {
            assert!(parse(bad).expect("known").wait().is_err(), "{bad}");
        }
    }

    #[test]
    fn json_errors_name_the_field() {
        let bad =
            from_json::<space_api::CreateSandbox>(br#"{"template": "a", "env": {"A": 1}}"#).expect_err("a number");
        assert_eq!(bad.field.as_deref(), Some("env.A"));
        let unknown = from_json::<space_api::CreateSandbox>(br#"{"template": "a", "nmae": 1}"#).expect_err("a typo");
        assert!(unknown.detail.contains("nmae"), "{unknown:?}");
        let deep = format!("{}1{}", "[".repeat(200_000), "]".repeat(200_000));
        assert!(from_json::<serde_json::Value>(deep.as_bytes()).is_err());
        assert!(from_json::<space_api::CreateSandbox>(br#"{"template": "a"} x"#).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_query_is_answered(query in "[ -~]{0,200}") {
            if let Ok(uri) = format!("/x?{query}").parse() {
                let _ = Params::parse(&uri, &["path"]);
            }
        }
    }
}
