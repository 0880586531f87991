//! What a registry asks for in `WWW-Authenticate`, and how that becomes an `Authorization`
//! header. Pure text. Must never print a credential.

use std::fmt;

const MAX_CHALLENGE_BYTES: usize = 8192;

/// A name and a password that do not show in logs.
#[derive(Clone)]
pub struct Credentials {
    pub user: String,
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).field("password", &"…").finish()
    }
}

/// How a registry wants to be asked.
#[derive(Debug, PartialEq, Eq)]
pub enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
}

/// Reads one header value. Several challenges in one value: the first known one counts.
pub fn parse(header: &str) -> Option<Challenge> {
    if header.len() > MAX_CHALLENGE_BYTES {
        return None;
    }
    let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
    if scheme.eq_ignore_ascii_case("basic") {
        return Some(Challenge::Basic);
    }
    if !scheme.eq_ignore_ascii_case("bearer") {
        return None;
    }
    let (mut realm, mut service, mut scope) = (None, None, None);
    for (key, value) in parameters(rest) {
        match key.to_ascii_lowercase().as_str() {
            "realm" => realm = Some(value),
            "service" => service = Some(value),
            "scope" => scope = Some(value),
            _ => {}
        }
    }
    Some(Challenge::Bearer { realm: realm?, service, scope })
}

/// `key="value"` or `key=value`, separated by commas; quoted values may hold commas.
fn parameters(text: &str) -> Vec<(String, String)> {
    let mut out = Vec::new();
    let mut chars = text.chars().peekable();
    loop {
        while chars.next_if(|c| *c == ',' || c.is_whitespace()).is_some() {}
        let mut key = String::new();
        while let Some(c) = chars.next_if(|c| *c != '=' && *c != ',') {
            key.push(c);
        }
        if chars.next_if_eq(&'=').is_none() {
            return out;
        }
        let mut value = String::new();
        if chars.next_if_eq(&'"').is_some() {
            while let Some(c) = chars.next() {
                match c {
                    '"' => break,
                    '\\' => value.extend(chars.next()),
                    c => value.push(c),
                }
            }
        } else {
            while let Some(c) = chars.next_if(|c| *c != ',') {
                value.push(c);
            }
        }
        out.push((key.trim().to_owned(), value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges() {
        let c = parse(r#"Bearer realm="https://a/t",service="s",scope="repository:x:pull,push""#);
        assert_eq!(
            c,
            Some(Challenge::Bearer {
                realm: "https://a/t".into(),
                service: Some("s".into()),
                scope: Some("repository:x:pull,push".into()),
            })
        );
        assert_eq!(parse("Basic realm=x"), Some(Challenge::Basic));
        assert_eq!(parse("Bearer service=x"), None);
        assert_eq!(parse("Negotiate"), None);
        assert_eq!(
            parse("Bearer realm=\"unterminated"),
            Some(Challenge::Bearer { realm: "unterminated".into(), service: None, scope: None })
        );
        assert_eq!(parse(""), None);
    }

    #[test]
    fn password_does_not_show() {
        let c = Credentials { user: "u".into(), password: "secret-word".into() };
        assert!(!format!("{c:?}").contains("secret-word"));
    }
}
