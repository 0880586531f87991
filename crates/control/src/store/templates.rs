//! Templates as the node last told them, and the tags that point to them. Tags are ours, templates the node's.

use std::collections::BTreeMap;

use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection};

use super::{Store, StoreError, signed, unsigned};

#[derive(Clone, Debug)]
pub struct TemplateRow {
    pub digest: String,
    pub memory_mib: u32,
    pub vcpus: u32,
    pub disk_bytes: u64,
    /// The API's `Template` without tags and count, JSON.
    pub info: String,
    pub created_at_ms: i64,
}

/// What taking a tag away means for the template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TagRemoval {
    /// Other tags point to it: only the tag is gone.
    Untagged,
    /// It is marked; the node must remove it now.
    Deleting {
        digest: String,
    },
    NotThere,
}

fn parse(row: &SqliteRow) -> Result<TemplateRow, StoreError> {
    Ok(TemplateRow {
        digest: row.try_get("digest")?,
        memory_mib: unsigned(row.try_get("memory_mib")?),
        vcpus: unsigned(row.try_get("vcpus")?),
        disk_bytes: unsigned(row.try_get("disk_bytes")?),
        info: row.try_get("info")?,
        created_at_ms: row.try_get("created_at_ms")?,
    })
}

/// A template that the node has. One that somebody is deleting stays so.
pub(super) async fn upsert(conn: &mut SqliteConnection, row: &TemplateRow) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO templates (digest, state, memory_mib, vcpus, disk_bytes, info, created_at_ms) \
         VALUES ($1, 'ready', $2, $3, $4, $5, $6) ON CONFLICT (digest) DO UPDATE SET info = excluded.info, \
         state = CASE templates.state WHEN 'deleting' THEN 'deleting' ELSE 'ready' END",
    )
    .bind(&row.digest)
    .bind(i64::from(row.memory_mib))
    .bind(i64::from(row.vcpus))
    .bind(signed(row.disk_bytes))
    .bind(&row.info)
    .bind(row.created_at_ms)
    .execute(conn)
    .await?;
    Ok(())
}

pub(super) async fn set_tag(
    conn: &mut SqliteConnection,
    name: &str,
    tag: &str,
    digest: &str,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO template_tags (name, tag, digest) VALUES ($1, $2, $3) \
         ON CONFLICT (name, tag) DO UPDATE SET digest = excluded.digest",
    )
    .bind(name)
    .bind(tag)
    .bind(digest)
    .execute(conn)
    .await?;
    Ok(())
}

/// Marks a template that no sandbox uses; its tags go at once, so that nobody finds it any more.
async fn mark_deleting(conn: &mut SqliteConnection, digest: &str) -> Result<bool, StoreError> {
    let used: i64 =
        sqlx::query_scalar("SELECT count(*) FROM sandboxes WHERE template_digest = $1 AND state <> 'deleted'")
            .bind(digest)
            .fetch_one(&mut *conn)
            .await?;
    if used > 0 {
        return Err(StoreError::InUse(unsigned(used)));
    }
    sqlx::query("DELETE FROM template_tags WHERE digest = $1").bind(digest).execute(&mut *conn).await?;
    let done =
        sqlx::query("UPDATE templates SET state = 'deleting' WHERE digest = $1").bind(digest).execute(conn).await?;
    Ok(done.rows_affected() == 1)
}

impl Store {
    /// The template a tag points to, when the node has it.
    pub async fn template_by_tag(&self, name: &str, tag: &str) -> Result<Option<TemplateRow>, StoreError> {
        let row = sqlx::query(
            "SELECT t.* FROM templates t JOIN template_tags g ON g.digest = t.digest \
             WHERE g.name = $1 AND g.tag = $2 AND t.state = 'ready'",
        )
        .bind(name)
        .bind(tag)
        .fetch_optional(&self.readers)
        .await?;
        row.as_ref().map(parse).transpose()
    }

    pub async fn template_by_digest(&self, digest: &str) -> Result<Option<TemplateRow>, StoreError> {
        let row = sqlx::query("SELECT * FROM templates WHERE digest = $1 AND state = 'ready'")
            .bind(digest)
            .fetch_optional(&self.readers)
            .await?;
        row.as_ref().map(parse).transpose()
    }

    pub async fn templates(&self) -> Result<Vec<TemplateRow>, StoreError> {
        let rows = sqlx::query("SELECT * FROM templates WHERE state = 'ready' ORDER BY created_at_ms, digest")
            .fetch_all(&self.readers)
            .await?;
        rows.iter().map(parse).collect()
    }

    /// Every tag as `name:tag`, by digest.
    pub async fn tags(&self) -> Result<BTreeMap<String, Vec<String>>, StoreError> {
        let rows = sqlx::query("SELECT digest, name, tag FROM template_tags ORDER BY name, tag")
            .fetch_all(&self.readers)
            .await?;
        let mut tags: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for row in rows {
            let tag = format!("{}:{}", row.try_get::<&str, _>("name")?, row.try_get::<&str, _>("tag")?);
            tags.entry(row.try_get("digest")?).or_default().push(tag);
        }
        Ok(tags)
    }

    /// Sandboxes that are not deleted, by template.
    pub async fn template_uses(&self) -> Result<BTreeMap<String, u32>, StoreError> {
        let rows = sqlx::query(
            "SELECT template_digest, count(*) AS n FROM sandboxes WHERE state <> 'deleted' GROUP BY template_digest",
        )
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(|row| Ok((row.try_get("template_digest")?, unsigned(row.try_get("n")?)))).collect()
    }

    /// Takes over the node's list: what it has is ready, what it no longer has is missing. Tags stay: a pool that is not
    /// mounted must not cost them.
    pub async fn sync_templates(&self, rows: Vec<TemplateRow>) -> Result<(), StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let known: Vec<String> = sqlx::query_scalar("SELECT digest FROM templates WHERE state = 'ready'")
                        .fetch_all(&mut *c)
                        .await?;
                    for row in &rows {
                        upsert(c, row).await?;
                    }
                    for digest in known.iter().filter(|d| rows.iter().all(|row| row.digest != **d)) {
                        sqlx::query("UPDATE templates SET state = 'missing' WHERE digest = $1 AND state = 'ready'")
                            .bind(digest)
                            .execute(&mut *c)
                            .await?;
                    }
                    Ok(())
                })
            })
            .await
    }

    /// False: there is no such template.
    pub async fn tag_template(&self, digest: String, name: String, tag: String) -> Result<bool, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let there: i64 =
                        sqlx::query_scalar("SELECT count(*) FROM templates WHERE digest = $1 AND state = 'ready'")
                            .bind(&digest)
                            .fetch_one(&mut *c)
                            .await?;
                    if there == 0 {
                        return Ok(false);
                    }
                    set_tag(c, &name, &tag, &digest).await?;
                    Ok(true)
                })
            })
            .await
    }

    /// Removes a tag, and marks the template for removal when it was the last one.
    pub async fn untag_template(&self, name: String, tag: String) -> Result<TagRemoval, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let digest: Option<String> =
                        sqlx::query_scalar("SELECT digest FROM template_tags WHERE name = $1 AND tag = $2")
                            .bind(&name)
                            .bind(&tag)
                            .fetch_optional(&mut *c)
                            .await?;
                    let Some(digest) = digest else { return Ok(TagRemoval::NotThere) };
                    let tags: i64 = sqlx::query_scalar("SELECT count(*) FROM template_tags WHERE digest = $1")
                        .bind(&digest)
                        .fetch_one(&mut *c)
                        .await?;
                    if tags == 1 {
                        mark_deleting(c, &digest).await?;
                        return Ok(TagRemoval::Deleting { digest });
                    }
                    sqlx::query("DELETE FROM template_tags WHERE name = $1 AND tag = $2")
                        .bind(&name)
                        .bind(&tag)
                        .execute(c)
                        .await?;
                    Ok(TagRemoval::Untagged)
                })
            })
            .await
    }

    /// Marks a template for removal, with all its tags.
    pub async fn mark_template_deleting(&self, digest: String) -> Result<TagRemoval, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    Ok(if mark_deleting(c, &digest).await? {
                        TagRemoval::Deleting { digest }
                    } else {
                        TagRemoval::NotThere
                    })
                })
            })
            .await
    }

    pub async fn deleting_templates(&self) -> Result<Vec<String>, StoreError> {
        Ok(sqlx::query_scalar("SELECT digest FROM templates WHERE state = 'deleting'").fetch_all(&self.readers).await?)
    }

    /// The node has removed it (`true`), or refused to (`false`: it is there again, without tags).
    pub async fn template_delete_done(&self, digest: String, removed: bool) -> Result<(), StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let sql = if removed {
                        "DELETE FROM templates WHERE digest = $1 AND state = 'deleting'"
                    } else {
                        "UPDATE templates SET state = 'ready' WHERE digest = $1 AND state = 'deleting'"
                    };
                    sqlx::query(sql).bind(digest).execute(c).await?;
                    Ok(())
                })
            })
            .await
    }
}
