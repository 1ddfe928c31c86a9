"""The pages of the site: Markdown, and in `site` what makes the others."""
